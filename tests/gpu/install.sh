#!/bin/sh
# Installs the package and a copy of its tests and benchmarks into a folder, without a package index: for a machine whose
# Python has everything needed but whose tree is not to be built in place. Run things from that folder, so that Python finds
# the installed package rather than the sources:
#
#   tests/gpu/install.sh /tmp/site && cd /tmp/site && python3 -m pytest -m gpu tests/gpu
set -eu
site=$1
cd "$(dirname "$0")/../.."
mkdir -p "$site"
python3 -m pip install -q --no-index --no-build-isolation --no-deps --upgrade --target "$site" .
cp -r benchmarks tests docs pyproject.toml "$site"/
