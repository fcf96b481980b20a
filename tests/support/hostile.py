"""Programs that try to get out, to take everything, or not to end. Each prints ESCAPED if it got what it wanted.

``{canary}`` is a file of the host, ``{target}`` a path of the host to write to, ``{port}`` a port on which the host listens.
"""

from __future__ import annotations

# ruff: noqa: E501

TRY = "try:\n    {body}\nexcept BaseException as e:\n    print(type(e).__name__)\n"


def attempt(body: str, before: str = "") -> str:
    return before + TRY.replace("{body}", body.replace("\n", "\n    "))


CONTAINED: dict[str, str] = {
    # files
    "read": attempt("print(open({canary}).read(), 'ESCAPED')"),
    "read bytes": attempt("import os\nprint(os.read(os.open({canary}, 0), 99), 'ESCAPED')"),
    "read by path": attempt("import pathlib\nprint(pathlib.Path({canary}).read_text(), 'ESCAPED')"),
    "climb": attempt("print(open('../' * 30 + {canary}.lstrip('/')).read(), 'ESCAPED')"),
    "proc": attempt("print(open('/proc/self/environ').read(), 'ESCAPED')"),
    "proc root": attempt("print(open('/proc/1/root/etc/hostname').read(), 'ESCAPED')"),
    "passwd": attempt("print(open('/etc/passwd').read(), 'ESCAPED')"),
    "listdir": attempt("import os\nassert {canary_name} in os.listdir({folder})\nprint('ESCAPED')"),
    "walk": attempt("import os\nassert any({canary_name} in f for _, _, f in os.walk('/'))\nprint('ESCAPED')"),
    "glob": attempt("import glob\nassert glob.glob({canary})\nprint('ESCAPED')"),
    "scandir": attempt("import os\nassert [e for e in os.scandir('/')]\nprint('ESCAPED')"),
    "stat": attempt("import os\nos.stat({canary})\nprint('ESCAPED')"),
    "write": attempt("open({target}, 'w').write('x')\nprint('ESCAPED')"),
    "append": attempt("open({canary}, 'a').write('x')\nprint('ESCAPED')"),
    "create": attempt("import os\nos.open({target}, os.O_CREAT | os.O_WRONLY)\nprint('ESCAPED')"),
    "mkdir": attempt("import os\nos.mkdir({target})\nprint('ESCAPED')"),
    "unlink": attempt("import os\nos.unlink({canary})\nprint('ESCAPED')"),
    "rename": attempt("import os\nos.rename({canary}, {target})\nprint('ESCAPED')"),
    "rmtree": attempt("import shutil\nshutil.rmtree({folder})\nprint('ESCAPED')"),
    "symlink": attempt("import os\nos.symlink({canary}, {target})\nprint('ESCAPED')"),
    "link": attempt("import os\nos.link({canary}, {target})\nprint('ESCAPED')"),
    "chmod": attempt(
        "import os\nos.chmod({canary}, 0o777)\nassert os.stat({canary}).st_mode & 0o777 == 0o777\nprint('ESCAPED')"
    ),
    "utime": attempt("import os\nos.utime({canary}, (1, 1))\nprint('ESCAPED')"),
    "truncate": attempt("import os\nos.truncate({canary}, 0)\nprint('ESCAPED')"),
    "tempfile": attempt("import tempfile\ntempfile.NamedTemporaryFile().write(b'x')\nprint('ESCAPED')"),
    "chdir": attempt("import os\nos.chdir({folder})\nprint('ESCAPED')"),
    "open descriptors": attempt(
        "import os\nfor fd in range(3, 200):\n    try:\n        print(os.read(fd, 9), 'ESCAPED')\n    except OSError:\n        pass"
    ),
    "write to other descriptors": attempt(
        "import os\nfor fd in range(3, 200):\n    try:\n        os.write(fd, b'x')\n        print('ESCAPED')\n    except OSError:\n        pass"
    ),
    "read the worker's input": attempt("import sys\nassert sys.stdin.readline()\nprint('ESCAPED')"),
    "sqlite": attempt("import sqlite3\nsqlite3.connect({target}).execute('create table t (x)')\nprint('ESCAPED')"),
    # network
    "connect": attempt("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('ESCAPED')"),
    "urlopen": attempt(
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)\nprint('ESCAPED')"
    ),
    "http": attempt(
        "import http.client\nhttp.client.HTTPConnection('127.0.0.1', {port}, timeout=1).request('GET', '/')\nprint('ESCAPED')"
    ),
    "listen": attempt("import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('ESCAPED')"),
    "udp": attempt("import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))\nprint('ESCAPED')"),
    "resolve": attempt("import socket\nsocket.getaddrinfo('localhost', 80)\nprint('ESCAPED')"),
    "asyncio server": attempt(
        "import asyncio\nasync def f():\n    await asyncio.start_server(lambda r, w: None, '127.0.0.1', 0)\nasyncio.run(f())\nprint('ESCAPED')"
    ),
    # processes, threads, native code
    "system": attempt("import os\nassert os.system('true') == 0\nprint('ESCAPED')"),
    "popen": attempt("import os\nos.popen('id').read()\nprint('ESCAPED')"),
    "subprocess": attempt("import subprocess\nsubprocess.run(['id'])\nprint('ESCAPED')"),
    "fork": attempt("import os\nos.fork()\nprint('ESCAPED')"),
    "fork bomb": attempt("import os\nwhile True:\n    os.fork()\nprint('ESCAPED')"),
    "spawn": attempt("import os\nos.posix_spawn('/bin/true', ['true'], {})\nprint('ESCAPED')"),
    "exec": attempt("import os\nos.execv('/bin/echo', ['echo', 'ESCAPED'])"),
    "multiprocessing": attempt("import multiprocessing\nmultiprocessing.Process(target=print).start()\nprint('ESCAPED')"),
    "threads": attempt("import threading\nthreading.Thread(target=print).start()\nprint('ESCAPED')"),
    "executor": attempt(
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(print).result(1)\nprint('ESCAPED')"
    ),
    "kill": attempt("import os\nos.kill(1, 9)\nprint('ESCAPED')"),
    "signal the parent": attempt("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('ESCAPED')"),
    "ctypes": attempt("import ctypes\nctypes.CDLL(None)\nprint('ESCAPED')"),
    "mmap": attempt("import mmap\nmmap.mmap(-1, 4096)\nimport ctypes\nprint('ESCAPED')"),
    "environment": attempt("import os\nassert {secret} in str(dict(os.environ))\nprint('ESCAPED')"),
    "arguments": attempt("import sys\nassert len(sys.argv) > 9 or {folder} in str(sys.argv)\nprint('ESCAPED')"),
    "install": attempt("import ensurepip\nensurepip.bootstrap()\nprint('ESCAPED')"),
    "import wasmtime": attempt("import wasmtime\nprint('ESCAPED')"),
    "import llm_steer": attempt("import llm_steer\nprint('ESCAPED')"),
    "resource limits": attempt(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))\nprint('ESCAPED')"
    ),
    "sys tricks": attempt(
        "import sys\nsys.modules['os'].__dict__.clear()\nsys.meta_path.clear()\n"
        "print([c for c in ().__class__.__base__.__subclasses__() if 'Popen' in c.__name__][0](['id']), 'ESCAPED')"
    ),
    "atexit": "import atexit\natexit.register(lambda: print(open({canary}).read(), 'ESCAPED'))\n",
    "faulthandler": attempt("import faulthandler\nfaulthandler._sigsegv()\nprint('ESCAPED')"),
    "forged answer": "import json\nprint(json.dumps({'status': 'ok', 'stdout': 'ESCAPED?'[:0], 'stderr': ''}))\n",
}
"""They come to an end by themselves."""

GREEDY: dict[str, tuple[str, tuple[str, ...]]] = {
    "loop": ("while True: pass", ("fuel",)),
    "loop that catches": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        ("fuel",),
    ),
    "comprehension": ("[x for x in iter(int, 1)]", ("fuel", "error", "crash")),
    "big power": ("print(len(str(7 ** 7 ** 9)))", ("fuel", "error", "crash")),
    "factorial": ("import math; math.factorial(10**7)", ("fuel", "error")),
    "backtracking": ("import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", ("fuel",)),
    "sort": ("sorted(range(10**9), key=lambda x: -x)", ("fuel", "error", "crash")),
    "string": ("x = 'a' * 10**9", ("error", "crash")),
    "list": ("x = [0] * 10**9", ("error", "crash")),
    "bytes": ("x = bytearray(2**31)", ("error", "crash")),
    "growth": ("x = []\nwhile True: x.append('y' * 10**6)", ("error", "crash", "fuel")),
    "doubling": ("x = 'a'\nwhile True: x += x", ("error", "crash", "fuel")),
    "dictionary": ("d = {}\ni = 0\nwhile True:\n    d[i] = str(i) * 100\n    i += 1", ("error", "crash", "fuel")),
    "zip bomb": (
        "import zlib\nx = zlib.compress(b'0' * 10**7)\ny = [zlib.decompress(x) for _ in range(10**4)]",
        ("error", "crash", "fuel"),
    ),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ("error", "crash", "fuel")),
    "deep repr": ("x = []\nfor _ in range(10**6): x = [x]\nrepr(x)", ("error", "crash", "fuel")),
    "deep parse": ("eval('(' * 10**5 + ')' * 10**5)", ("error", "crash")),
    "deep compile": ("compile('-' * 10**5 + '1', '', 'eval')", ("error", "crash", "fuel")),
    "flood": ("while True: print('x' * 1000)", ("output",)),
    "flood of bytes": ("import os\nwhile True: os.write(1, b'x' * 10**6)", ("output",)),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", ("output",)),
    "flood of warnings": ("import warnings\ni = 0\nwhile True:\n    i += 1\n    warnings.warn(str(i))", ("output", "fuel")),
    "one long line": ("print('x' * 10**7)", ("output",)),
    "flood that catches": (
        "while True:\n    try:\n        print('x' * 10**5)\n    except BaseException: pass",
        ("output",),
    ),
    "abort": ("import os; os.abort()", ("crash", "error")),
    "exit": ("import os; os._exit(7)", ("error",)),
    "generator": ("def g():\n    while True: yield 1\nsum(g())", ("fuel",)),
    "class tricks": ("class A:\n    def __del__(self): A()\nA()", ("ok", "fuel", "crash", "error")),
}
"""They take all of something; with what may become of them."""

SLEEPERS = {
    "sleep": "import time; time.sleep(10**6)",
    "select": "import select; select.select([], [], [], 10**6)",
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(10**6))",
}
"""They wait, which burns no fuel."""
