from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

root = Path(__file__).parent
sources = sorted(str(p.relative_to(root)) for p in (root / "csrc").rglob("*.cpp") if "cuda" not in p.parts)
setup(
    ext_modules=[
        CppExtension(
            "bmtrain._C",
            sources,
            include_dirs=[str(root / "csrc")],
            extra_compile_args=["-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
