#!/usr/bin/env bash
# Builds the documentation as a site into build/docs/site, in English and, below zh-CN, in Chinese. It opens offline:
# build/docs/site/index.html. Any warning of Sphinx and any link that leads nowhere ends it.
# --only-build: installs nothing, once all of it is there.
# Needs Python 3.11 or newer with venv and pip; PYTHON names another interpreter than python3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [[ ${1:-} != --only-build ]]; then # what is installed stays as it is
    create_environment
    install_attemper dev
    build_native
    install_docs
fi

# What is built is this tree, whatever .venv holds.
export PYTHONPATH="$root/src:$root"
python=build/docs-venv/bin/python
begun=$SECONDS
rm -rf build/docs
$python -m scripts.website sources build/docs/source

# site FOLDER LANGUAGE: the site of the sources in that language.
site() {
    $python -m sphinx -n -W --keep-going -q -c docs -D language="${2//-/_}" "build/docs/source/$2" "$1"
}

say "Sphinx, in English and in Chinese; beside it the pages of the gallery"
site build/docs/site en &
english=$!
site build/docs/chinese zh-CN &
chinese=$!
$python -m scripts.website gallery build/docs/gallery &
gallery=$!
failed=
wait "$english" || failed="the English site"
wait "$chinese" || failed="${failed:+$failed and }the Chinese site"
wait "$gallery" || failed="${failed:+$failed and }the gallery"
[[ ! $failed ]] || fail "FAILED: $failed"

mv build/docs/chinese build/docs/site/zh-CN
mv build/docs/gallery build/docs/site/gallery
$python -m scripts.website finish build/docs/source build/docs/site
say "build/docs/site/index.html, in $((SECONDS - begun)) s"
