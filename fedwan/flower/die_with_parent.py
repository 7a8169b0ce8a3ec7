"""Start a program that the kernel ends when its parent dies, however the parent dies.

Run as a script, `python -I -S die_with_parent.py PARENT_PID PROGRAM ARG…`: it asks for SIGTERM at
the parent's death (prctl(2), PR_SET_PDEATHSIG) and becomes the program. A script of its own, not a
`preexec_fn`, because code between fork and exec deadlocks where the parent has threads. Where prctl
is missing (not Linux), the program simply starts.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call above
            sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 (words of our own)
