import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy

ROOT = pathlib.Path(__file__).resolve().parents[3]


class Chorus(ConanFile):
    name = "chorus"
    description = "Header-only C++20 deep learning in which the parallel policy is a type"
    license = "MIT"
    settings = "os", "arch", "compiler", "build_type"
    options = {part: [True, False] for part in ("compiled", "zlib", "openssl", "png", "jpeg", "cuda", "mpi", "gloo")}
    default_options = {part: False for part in options}
    # CUDA, MPI and gloo are the system's.
    required = {"zlib": "zlib/[>=1.2.11 <2]", "openssl": "openssl/[>=1.1 <4]", "png": "libpng/[>=1.6 <2]", "jpeg": "libjpeg-turbo/[>=2 <4]"}

    def set_version(self):
        text = (ROOT / "include/chorus/core/config.hpp").read_text()
        self.version = ".".join(re.search(rf"define CHORUS_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "include/*"):
            copy(self, pattern, ROOT, self.export_sources_folder)

    def configure(self):
        self.package_type = "static-library" if self.options.compiled else "header-library"

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        headers = {"transitive_headers": True, "transitive_libs": True}
        self.requires("eigen/[>=3.4 <4]", **headers)
        self.requires("nlohmann_json/[>=3.10 <4]", **headers)
        for part, package in self.required.items():
            if self.options.get_safe(part):
                self.requires(package, **headers)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        # The options are in chorus' own CMake files, so that they count even without a compiled library.
        if not self.info.options.compiled:
            self.info.settings.clear()

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for variable in ("CHORUS_BUILD_TESTS", "CHORUS_BUILD_EXAMPLES", "CHORUS_NATIVE"):
            toolchain.cache_variables[variable] = False
        toolchain.cache_variables["CHORUS_INSTALL"] = True
        toolchain.cache_variables["CHORUS_BUILD_COMPILED"] = bool(self.options.compiled)
        for part in self.options.possible_values:
            if part != "compiled":
                toolchain.cache_variables[f"CHORUS_WITH_{part.upper()}"] = "ON" if self.options.get_safe(part) else "OFF"
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, pathlib.Path(self.package_folder) / "licenses")

    def package_info(self):
        # find_package finds the files that chorus itself installs.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/chorus"]
