"""Programs that try to get out, to last, to use up the machine, or to be paid for nothing.

Each is (name, source, test): a script where there is no test, else what a test is run
against. None may pass, print `ESCAPED`, or leave a trace outside. `{port}`, `{parent}`,
`{file}` and `{folder}` are filled in: a listener's port, the number of the process that
asks, a file of its that can be read by all, and a folder that all may write to.
"""

from __future__ import annotations

# Where a program gets further than its attempt, it says so.
SCRIPTS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb of threads": "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(9,)).start()",
    "fork by clone": "import ctypes\nassert ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0\nprint('ESCAPED')",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))\nprint('ESCAPED')",
    "memory at once": "x = bytearray(1 << 33)\nprint('ESCAPED')",
    "memory by a huge number": "x = 10 ** 10 ** 10\nprint('ESCAPED')",
    "memory files": (
        "import os\nfd = os.memfd_create('a')\nos.write(fd, b'a' * (1 << 20))\nprint('ESCAPED')"
    ),
    "zip bomb": (
        "import zlib, io\nbomb = zlib.compress(bytes(1 << 28))\nx = [zlib.decompress(bomb) for _ in range(64)]\n"
        "print('ESCAPED')"
    ),
    "endless output": "while True: print('x' * 65536)",
    "endless errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "endless loop": "while True: pass",
    "endless sleep": "import time\ntime.sleep(1e6)",
    "signals ignored": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "output closed": "import os\nos.close(1); os.close(2)\nwhile True: pass",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "deep expression": "eval('(' * 10 ** 5)",
    "deep source": "-" * 100_000 + "1",
    "crash": "import ctypes\nctypes.string_at(0)",
    "environment": "import os\nprint(os.environ.get('SECRET_KEY') and 'ESCAPED', dict(os.environ))",
    "environment of the parent": "print(open('/proc/{parent}/environ').read(), 'ESCAPED')",
    "environment of process 1": "print(open('/proc/1/environ').read(), 'ESCAPED')",
    "memory of the worker": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)\nprint('ESCAPED')",
    "a file": "print(open('{file}').read(), 'ESCAPED')",
    "a file through a link": "import os\nos.symlink('{file}', '/tmp/a')\nprint(open('/tmp/a').read(), 'ESCAPED')",
    "a file through the library": (
        "import os\nprint(open(os.path.dirname(os.__file__) + '/../' * 20 + '{file}').read(), 'ESCAPED')"
    ),
    "passwords": "print(open('/etc/passwd').read(), 'ESCAPED')",
    "writing": "open('{folder}/escaped', 'w').write('x')\nprint('ESCAPED')",
    "writing into the library": "import os\nopen(os.__file__, 'a').write('x')\nprint('ESCAPED')",
    "shared memory": "open('/dev/shm/escaped', 'w').write('x')\nprint('ESCAPED')",
    "huge file": "import tempfile\ntempfile.TemporaryFile().write(bytes(1 << 30))\nprint('ESCAPED')",
    "a disk": "import os\nos.open('/dev/sda', os.O_RDONLY)\nprint('ESCAPED')",
    "deleting": "import shutil\nshutil.rmtree('{folder}')\nprint('ESCAPED')",
    "changing rights": "import os\nos.chmod('{file}', 0)\nprint('ESCAPED')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port})).send(b'hello')\nprint('ESCAPED')",
    "network by datagrams": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\n"
        "print('ESCAPED')"
    ),
    "a local socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0escaped')\nprint('ESCAPED')",
    "another network": "import ctypes, os\nos.listdir('/proc/1/ns')\nprint('ESCAPED')",
    "killing the parent": "import os\nos.kill({parent}, 9)\nprint('ESCAPED')",
    "killing the worker": "import os\nos.kill(os.getppid(), 9)\nprint('ESCAPED')",
    "killing everyone": "import os\nos.kill(-1, 9)\nprint('ESCAPED')",
    "stopping the worker": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nprint('ESCAPED')",
    "signals by a file": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())\n"
        "fcntl.fcntl(r, 10, 9)\nprint('ESCAPED')"
    ),
    "ptrace": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\nprint('ESCAPED')",
    "the worker's memory by a call": (
        "import ctypes, os\nl = ctypes.CDLL(None)\nb = ctypes.create_string_buffer(8)\n"
        "v = (ctypes.c_ulong * 2)(ctypes.addressof(b), 8)\n"
        "assert l.process_vm_readv(os.getppid(), v, 1, v, 1, 0) >= 0\nprint('ESCAPED')"
    ),
    "the worker's limits": (
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\nprint('ESCAPED')"
    ),
    "its own limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')",
    "daemon": "import os\nif os.fork() == 0:\n  os.setsid()\n  while True: pass\nprint('ESCAPED')",
    "another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "a subprocess": "import subprocess\nprint(subprocess.run(['echo', 'ESCAPED'], capture_output=True).stdout)",
    "mounting": "import ctypes\nassert ctypes.CDLL(None).mount(b'proc', b'/tmp', b'proc', 0, 0) == 0\nprint('ESCAPED')",
    "a root of its own": "import os\nos.chroot('/')\nprint('ESCAPED')",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint('ESCAPED')",
    "root": "import os\nos.setuid(0) if os.getuid() else os.setuid(1)\nprint('ESCAPED')",
    "the answer, from files that are open": (
        "import os\nfor fd in range(256):\n  try: os.lseek(fd, 0, 0); print(os.read(fd, 99))\n  except OSError: pass"
    ),
    "the answer's mark": "print('{\"passed\": true}')",
    "the verdict's file": (
        "import os\nfor fd in range(3, 256):\n  try: os.write(fd, b'{\"passed\": true}')\n  except OSError: pass"
    ),
}

ASSERTION = {"code": "assert f(20) == 42"}
CALL = {"call": "f", "args": [20], "expected": 42}
# Against tests that are run on them: paid for nothing?
TESTED = {
    "leaving as it is imported": ("import os\nos._exit(0)", ASSERTION),
    "leaving as it is called": ("import os\ndef f(x): os._exit(0)", ASSERTION),
    "an end that is no error": ("def f(x): raise SystemExit(0)", CALL),
    "an object that equals everything": (
        "class A:\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\ndef f(x): return A()",
        ASSERTION,
    ),
    "an int that equals everything": (
        "class A(int):\n  __eq__ = lambda s, o: True\ndef f(x): return A(1)",
        ASSERTION,
    ),
    "a list that equals everything": (
        "class A(list):\n  __eq__ = lambda s, o: True\ndef f(x): return A()",
        CALL,
    ),
    "assertions that never fail": (
        "import builtins\nbuiltins.AssertionError = Warning\ndef f(x): return 1",
        ASSERTION,
    ),
    "another abs": (
        "def abs(x): return 0\ndef f(x): return 1",
        {"code": "assert abs(f(20) - 42) < 1e-6"},
    ),
    "another math": (
        "class math:\n  isclose = lambda *a: True\ndef f(x): return 1",
        {"code": "import math\nassert math.isclose(f(20), 42)"},
    ),
    "another json in the checker": (
        "import json, sys\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 1",
        ASSERTION,
    ),
    "the tests' frames": (
        "import sys, gc\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
        "    frame.f_globals['f'] = lambda x: 42\n"
        "    frame.f_locals.update(expected=1)\n    frame = frame.f_back\n  return 1",
        ASSERTION,
    ),
    "the expected value, from memory": (
        "import gc\ndef f(x):\n  for o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'expected' in o: return o['expected']\n"
        "  return 0",
        CALL,
    ),
    "a verdict written by hand": (
        "import os\ndef f(x):\n  for fd in range(3, 99):\n"
        "    try: os.write(fd, b'{\"passed\": true}\\n')\n    except OSError: pass\n"
        "  os._exit(0)",
        ASSERTION,
    ),
    "an answer that is too long": ("def f(x): return 'x' * (1 << 27)", ASSERTION),
    "an answer that is too deep": (
        "def f(x):\n  a = []\n  for _ in range(10 ** 5): a = [a]\n  return a",
        ASSERTION,
    ),
    "an answer without end": ("def f(x):\n  while True: pass", ASSERTION),
    "calling back into the tests": (
        "import sys\npeer = None\ndef f(g):\n  g.__globals__['f'] = lambda x: 42\n  return 1",
        {"code": "assert f(lambda x: x) == 42"},
    ),
}
