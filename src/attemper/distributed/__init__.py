"""Many ranks and many workers: samples of a training on several processes made one, and scans in shards."""
