#!/usr/bin/env bash
# A scan of many texts by a SLURM array, and one merged reading of it. Submit it from a login node:
#
#     bash examples/slurm_scan.sh MODEL TEXTS FOLDER
#
# TEXTS and FOLDER are on a disk that every node sees. Submitted again, it scans only what is missing.
set -euo pipefail

model=$1 texts=$2 folder=$3
mkdir -p "$folder"

array=$(sbatch --parsable --job-name attemper-scan --array=0-63 --time=02:00:00 --gpus=1 --cpus-per-task=4 --requeue \
    --output "$folder/%a.log" \
    --wrap "attemper scan '$model' --texts '$texts' --out '$folder/parts' --device cuda")

# Merging needs no GPU and no torch. Without its array's last task it names the shards that are missing.
sbatch --job-name attemper-merge --dependency "afterany:$array" --time=00:10:00 --output "$folder/merge.log" \
    --wrap "attemper merge '$folder/parts' --out '$folder/whole.safetensors' --html '$folder/page.html'"
