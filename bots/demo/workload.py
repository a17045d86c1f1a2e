"""The demo's jobs: each compiles one module of the running Python's standard library.

A job compiles its module in a process of its own and prints a digest of the code. The digest depends only on the
code's content, not on the process, its addresses or its hash seed. `digest_of` computes the digest independently in
the demo's process: it decodes the source itself and walks the code without recursion.
"""

import hashlib
import io
import os
import platform
import struct
import subprocess
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import CodeType
from typing import Any

#: The least number of jobs. If the standard library has fewer modules, its tests and then installed packages are added.
AT_LEAST = 600
#: A user id for the question whether commands under another account can run this interpreter.
JOB_ACCOUNT = 65519
#: Modules of at least this size, in bytes, require a large bot.
LARGE = 32 * 1024

#: Attributes of a code object that its digest covers, in this order.
CONTENT = (
    "co_name", "co_qualname", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize",
    "co_flags", "co_firstlineno", "co_code", "co_linetable", "co_exceptiontable", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_consts",
)  # fmt: skip

#: The program of a job: `python -c PROGRAM PATH NAME` prints `DIGEST NAME`.
PROGRAM = f"""
import sys
from hashlib import sha256
from struct import pack
from types import CodeType

def form(value):
    kind = type(value)
    if value is None or value is Ellipsis or kind is bool:
        return ("%r;" % (value,)).encode()
    if kind is int:
        return b"i%x;" % value
    if kind is float:
        return b"d" + pack(">d", value)
    if kind is complex:
        return b"z" + pack(">dd", value.real, value.imag)
    if kind is str:
        raw = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(raw) + raw
    if kind is bytes:
        return b"b%d:" % len(value) + value
    if kind is tuple:
        return b"t%d:" % len(value) + b"".join(map(form, value))
    if kind is frozenset:
        return b"f%d:" % len(value) + b"".join(sorted(map(form, value)))
    if kind is CodeType:
        return b"c" + b"".join(form(getattr(value, name)) for name in {CONTENT!r})
    if kind.__name__ == "slice":
        return b"l" + form(value.start) + form(value.stop) + form(value.step)
    raise TypeError(kind)

with open(sys.argv[1], "rb") as source:
    code = compile(source.read(), sys.argv[2], "exec", dont_inherit=True, optimize=0)
print(sha256(form(code)).hexdigest(), sys.argv[2])
"""

_TESTS = frozenset({"test", "tests", "idle_test"})
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_WEB = frozenset(
    {"asyncio", "email", "ftplib", "html", "http", "imaplib", "json", "mimetypes", "poplib", "smtplib", "socket"}
    | {"socketserver", "ssl", "urllib", "uuid", "webbrowser", "wsgiref", "xml", "xmlrpc"}
)
_CORE = frozenset(
    {"collections", "compression", "concurrent", "ctypes", "encodings", "importlib", "logging", "multiprocessing"}
    | {"pathlib", "re", "sqlite3", "string", "tomllib", "zipfile", "zoneinfo"}
)
#: Instances of the demo and the priority of their jobs: lower is more urgent.
PRIORITIES = {"web": -10, "core": 0, "tools": 10}


@dataclass(frozen=True)
class Module:
    """One source file.

    name: its path below the root under which it was found. package: the top directory of that path. size: bytes.
    """

    path: Path
    name: str
    package: str
    size: int

    @property
    def instance(self) -> str:
        """The instance whose job compiles this module, chosen by the module's purpose."""
        part = self.name.removesuffix(".py").split("/")[0]
        if part in _WEB:
            return "web"
        return "core" if part in _CORE or self.package == "lib" else "tools"


def runs_under_other_accounts() -> bool:
    """Return True unless this process is root and its interpreter is where only root can read it."""
    if os.geteuid() != 0:
        return True
    # Any number will do that is neither root's nor that of an owner of files.
    nobody: dict[str, Any] = {"user": JOB_ACCOUNT, "group": JOB_ACCOUNT, "extra_groups": []}
    probe = [sys.executable, "-I", "-S", "-c", "pass"]
    try:
        return subprocess.run(probe, capture_output=True, check=False, cwd="/", **nobody).returncode == 0
    except OSError:
        return False


def find_modules(limit: int | None = None, *, at_least: int = AT_LEAST) -> list[Module]:
    """List the modules in an order that depends only on the installation.

    limit: the number of modules to select evenly; None = all. at_least: see AT_LEAST.
    """
    found = list(_walk(Path(sysconfig.get_path("stdlib")), _FOREIGN | _TESTS))
    spare = chain(
        _walk(Path(sysconfig.get_path("stdlib")) / "test", _FOREIGN),
        _walk(Path(sysconfig.get_path("purelib")), frozenset({"__pycache__"})),
    )
    found += islice(filter(_compiles, spare), max(0, at_least - len(found)))
    if limit is None or limit >= len(found):
        return found
    return [found[nth * len(found) // limit] for nth in range(limit)]


def request_for(module: Module) -> dict[str, Any]:
    """Return the request for the job that compiles one module.

    Its priority depends on the instance, its locality hint on the package, its properties on the module's size.
    """
    needs = {"os": sys.platform, "python": platform.python_version()}
    return {
        "command": [sys.executable, "-I", "-S", "-W", "ignore", "-c", PROGRAM, str(module.path), module.name],
        "instance": module.instance,
        "priority": PRIORITIES[module.instance],
        "properties": needs | ({"size": "large"} if module.size >= LARGE else {}),
        "locality_hint": module.package,
        "label": module.name[-64:],
        "timeout_seconds": 120.0,
    }


def expected_output(module: Module) -> bytes:
    """Compute the output that the job must write."""
    return f"{digest_of(module)} {module.name}\n".encode()


def digest_of(module: Module) -> str:
    """Compute the digest in this process: SHA-256 over the content of the module's code."""
    raw = module.path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(raw.decode(encoding), module.name, "exec", dont_inherit=True, optimize=0)
    return hashlib.sha256(_flat(code)).hexdigest()


def _flat(root: object) -> bytes:
    """Serialise the content of a constant, which may be a code object, to bytes."""
    written = bytearray()
    stack: list[object] = [root]
    while stack:
        match stack.pop():
            case None | bool() as plain:
                written += f"{plain};".encode()
            case int() as number:
                written += f"i{number:x};".encode()
            case float() as number:
                written += b"d" + struct.pack(">d", number)
            case complex() as number:
                written += b"z" + struct.pack(">dd", number.real, number.imag)
            case str() as text:
                raw = text.encode("utf-8", "surrogatepass")
                written += f"s{len(raw)}:".encode() + raw
            case bytes() as raw:
                written += f"b{len(raw)}:".encode() + raw
            case tuple() as items:
                written += f"t{len(items)}:".encode()
                stack += reversed(items)
            case frozenset() as items:
                written += f"f{len(items)}:".encode() + b"".join(sorted(_flat(item) for item in items))
            case CodeType() as code:
                written += b"c"
                stack += [getattr(code, name) for name in reversed(CONTENT)]
            case slice() as part:
                written += b"l"
                stack += [part.step, part.stop, part.start]
            case plain if plain is Ellipsis:
                written += b"Ellipsis;"
            case other:
                raise TypeError(f"a constant of type {type(other).__name__} has no form")
    return bytes(written)


def _walk(root: Path, without: frozenset[str]) -> Iterator[Module]:
    for directory, below, files in os.walk(root):
        below[:] = sorted(set(below) - without)
        for path in (Path(directory, file) for file in sorted(files) if file.endswith(".py")):
            if path.is_file():
                place = path.relative_to(root)
                package = place.parts[0] if len(place.parts) > 1 else "lib"
                yield Module(path=path, name=place.as_posix(), package=package, size=path.stat().st_size)


def _compiles(module: Module) -> bool:
    """Return True if the module compiles; some of Python's tests are invalid on purpose."""
    try:
        digest_of(module)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def shares(modules: Iterable[Module]) -> Mapping[str, int]:
    """Count the modules of each instance, the most urgent instance first."""
    counts = dict.fromkeys(PRIORITIES, 0)
    for module in modules:
        counts[module.instance] += 1
    return {name: count for name, count in counts.items() if count}
