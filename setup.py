"""Builds what `cluster.core.compiled` names, where there are a C compiler and mypy; else the servers are plain Python.

    python setup.py build_ext --build-lib .          in place: `make native`
    pip wheel --no-build-isolation .                 a wheel with it; in an isolated build mypy is missing, and the wheel is plain

`PIXIU_COMPILE=0` asks for plain Python, `PIXIU_COMPILE=1` for a failure instead of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import zlib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from cluster.core.compiled import FOLDER, MODULES, STAMP, SUFFIX, SWITCH, library_of, names, source_of, stamp  # noqa: E402

OPTIMIZATION = os.environ.get("PIXIU_OPTIMIZATION", "1")
"""Of the C compiler: 0 to 3."""

CHECKS = ("--enable-error-code=redundant-expr", "--warn-unreachable", "--follow-imports=silent")
"""mypyc builds upon what mypy has narrowed: after `if self.x is None: return` a call may set `self.x`, but a second question is
left out, and with it what follows. Such code is refused: ask a local name or a method. What is imported and not compiled is not
checked."""


def missing() -> str:
    """What keeps this machine from compiling; empty when nothing does."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler).split()[0]) is None:
        return "there is no C compiler"
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "mypy is not installed here"
    return ""


class CompiledDistribution(Distribution):
    """Its wheel is of this machine where something is compiled."""

    def has_ext_modules(self) -> bool:
        """Whether `build_ext` has anything to do."""
        return os.environ.get(SWITCH) != "0" and not missing()


class BuildCompiled(build_ext):
    """Compiles all modules into one folder, and writes there what they were compiled from."""

    def get_ext_filename(self, fullname: str) -> str:
        """All in one folder, each by its full name: `cluster.core.compiled` finds them there, and nothing else does."""
        return f"{FOLDER}/{fullname}{SUFFIX}"

    def get_ext_fullpath(self, ext_name: str) -> str:
        """The same, below the folder of what is built."""
        return str(Path(self.build_lib) / self.get_ext_filename(ext_name))

    def run(self) -> None:
        """Compile; where that cannot be, say in a line that plain Python runs, and why."""
        reason = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else missing()
        if self.editable_mode:
            reason = "`make native` compiles what is installed as editable"
        if not reason:
            try:
                self._compile(Path(self.build_lib).resolve() / FOLDER)
                return
            except (BaseError, CompileError, LinkError, SystemExit):  # mypyc has said what it does not take, and ends the process
                reason = "it did not compile, see above"
        if os.environ.get(SWITCH) == "1" and not self.editable_mode:
            raise SystemExit(f"pixiu: not compiled: {reason}")
        print(f"pixiu: plain Python: {reason}", file=sys.stderr)

    def _compile(self, folder: Path) -> None:
        from mypyc.build import mypycify

        folder.mkdir(parents=True, exist_ok=True)
        (folder / STAMP).unlink(missing_ok=True)  # without it nothing of the folder is used
        before = stamp(ROOT)  # what changes while it is compiled does not count as compiled
        groups = [
            ([str(source_of(f"{package}.{module}")) for module in modules.split()], library_of(package))
            for package, modules in MODULES.items()
        ]
        # What mypyc remembers of a module is of its group: with another list it would look for classes where they are no more.
        cache = f"build/native/cache-{zlib.crc32(repr(MODULES).encode()):08x}"
        self.distribution.ext_modules = mypycify(
            [*(str(source_of(name)) for name in names()), "--config-file", "setup.cfg", "--cache-dir", cache, *CHECKS],
            opt_level=OPTIMIZATION,
            debug_level="0",
            target_dir="build/native",
            separate=groups,
        )
        self.swig_opts = None  # options are settled a second time, with what there is to compile
        super().finalize_options()
        super().run()
        (folder / STAMP).write_text(before)


os.chdir(ROOT)
setup(distclass=CompiledDistribution, cmdclass={"build_ext": BuildCompiled})
