"""Every test process computes with one thread, as the workflow's jobs do; set before numpy or torch is imported."""

import os

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")  # the same cases at every landing
