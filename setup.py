"""Builds the engine with make before packaging, and tags wheels py3-none-<platform>: one library serves any Python."""

import os
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildWithEngine(build_py):
    """Compiles libm3 into the package folder, then copies the package."""

    def run(self) -> None:
        # Under `make install` the engine is built by that make, in the same folder at the same time.
        if os.environ.get("M3_ENGINE") != "make":
            subprocess.run(["make", "native", f"GGUF_PYTHON={sys.executable}"], check=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """Says that the wheel holds compiled code, though no Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithEngine, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
