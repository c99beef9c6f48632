"""What every test stands on: one thread per process, and no settings from the environment of whoever runs the tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in [name for name in os.environ if name.split("_")[0] == "COMMHOOKS"]:
    del os.environ[name]
