"""A candidate that changes what belongs to the user who runs the search: `python -m tests.sandbox.ordinary_user FILE`.

Prints, for each set of layers, what the calls for a change of FILE gave; started as another user than root by a test.
"""

from __future__ import annotations

import json
import sys

from tests.sandbox.worlds import lab, module

CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
path, here = {path!r}.encode(), -100
fd, flags, me = os.open(path, os.O_RDONLY), ctypes.c_int(0x40), os.getuid()
asked = dict(
    chmod=(path, 0), fchmod=(fd, 0), fchmodat=(here, path, 0, 0),
    chown=(path, me, me), fchown=(fd, me, me), lchown=(path, me, me), fchownat=(here, path, me, me, 0),
    utime=(path, None), utimes=(path, None), futimes=(fd, None), utimensat=(here, path, None, 0),
    setxattr=(path, b"user.note", b"1", 1, 0), lsetxattr=(path, b"user.note", b"1", 1, 0),
    fsetxattr=(fd, b"user.note", b"1", 1, 0), removexattr=(path, b"user.seen"), lremovexattr=(path, b"user.seen"),
    fremovexattr=(fd, b"user.seen"), ioctl=(fd, ctypes.c_ulong(0x40086602), ctypes.byref(flags)),
)
found = dict()
for name, arguments in asked.items():
    found[name] = [getattr(libc, name)(*arguments), ctypes.get_errno()]
"""


def main(path: str) -> None:
    for without in ((), ("seccomp",), ("namespaces", "landlock")):
        with lab(audited=False, without=without) as box:
            outcome = box.run(module(CALLS.format(path=path)))
            assert outcome.failure is None, str(outcome.failure)
            print(json.dumps([box.sandbox.missing, outcome.fields["answer"]]))


if __name__ == "__main__":
    main(sys.argv[1])
