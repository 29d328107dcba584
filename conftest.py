"""What pytest must not look at where a part is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["src/polyphily/nn/triton_kernels.py"]
