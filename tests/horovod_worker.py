"""One rank of the Horovod tests: runs the cases of its command line, prints nothing, leaves a JSON file."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import commhooks.horovod as hvd
import tests.horovod_cases
import tests.horovod_cases_use  # noqa: F401  (each module adds its cases to CASES)
from tests.horovod_training import CASES, SETS


def main():
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    pair = hvd.ProcessSet([0, 1])
    # The pair is the world when there are two ranks; Horovod refuses a second set of the same ranks.
    SETS.append(hvd.global_process_set if os.environ["HOROVOD_SIZE"] == "2" else pair)
    hvd.init(process_sets=[pair] if SETS[0] is pair else None)
    results = {}
    for name in wanted or CASES:
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = {"traceback": traceback.format_exc()}
            break  # the other ranks are elsewhere now; they end when Horovod tells them that this one has
        out.with_suffix(f".{hvd.rank()}").write_text(json.dumps(results))
    else:
        hvd.barrier()
    out.with_suffix(f".{hvd.rank()}").write_text(json.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    main()
