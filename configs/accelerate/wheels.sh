#!/usr/bin/env bash
# Run: configs/accelerate/wheels.sh; then on the GPU machine: pip install --no-index --no-deps .whl/*
# Cost: seconds, 2 MB
# Expect: in .whl/, the packages that our GPU machine, which has no network, lacked beside torch, transformers, accelerate, pandas, pyarrow,
#         matplotlib, scipy, scikit-learn and tensorboard; add to the list below what yours lacks
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf .whl
pip=python3; [ -x .venv/bin/python ] && pip=.venv/bin/python
PIP_CONSTRAINT=configs/constraints.txt $pip -m pip download --quiet --no-deps --only-binary :all: --dest .whl \
  --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  jsonargparse docstring_parser typeshed_client importlib_resources datasets dill multiprocess evaluate
ls .whl
