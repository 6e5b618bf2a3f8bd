#!/bin/bash
# A small environment over the one that a host is installed in: with this checkout's Firstlight, which the host finds by its
# entry points, and what the tests need. The host's own environment stays as it is, for comparisons without us.
# Usage: bash scripts/over_host.sh HOST_FOLDER FOLDER [PACKAGE_FOLDER...]; the packages are installed as they lie there.
set -euo pipefail
host=$1 folder=$2
shift 2
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"$host/bin/python" -m venv "$folder"
packages "$host" > "$(packages "$folder")/host.pth"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install pytest pytest-timeout gguf
# Our own dependencies are the host's, in the host's versions.
for package in . "$@"; do
    pip install --no-deps --editable "$package"
done
