"""Install a wheel into environments that have a torch, without a compiler, and train 2 ranks in each.

python tests/scripts/try_wheel.py WHEEL ENVIRONMENT...
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

TRAINING = Path(__file__).with_name("train_with_wheel.py")


def main() -> None:
    wheel, *environments = [Path(name).resolve() for name in sys.argv[1:]]
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    for environment in environments:
        python = str(environment / "bin" / "python")
        began = time.perf_counter()
        pip = ("-m", "pip", "--disable-pip-version-check")
        run(environment, python, *pip, "install", "-q", "--no-deps", "--force-reinstall", str(wheel))
        installed = time.perf_counter() - began
        version = run(environment, python, "-c", "import torch; print(torch.__version__)").strip()
        began = time.perf_counter()
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAINING))
        told = run(environment, python, *launcher)
        losses = re.findall(r"loss ([\d.]+)", told)
        core = re.findall(r"core .*_cores/(\w+)", told)
        print(
            f"torch {version}: installed in {installed:.1f} s, core of {core[0]}, losses {losses[0]} to {losses[-1]} "
            f"in {time.perf_counter() - began:.1f} s"
        )


def run(environment: Path, *command: str) -> str:
    """Runs a command that finds the environment's programs and no others."""
    variables = {"PATH": str(environment / "bin"), "HOME": str(environment), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=variables, cwd=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
