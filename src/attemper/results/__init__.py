"""Results that users hold: scans, comparisons, runs, patterns. Each draws itself; none needs torch to load."""
