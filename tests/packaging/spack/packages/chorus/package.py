from spack.package import *


class Chorus(CMakePackage):
    """Header-only C++20 deep learning in which the parallel policy is a type."""

    license("MIT")

    # From a checkout: spack dev-build.
    version("0.1.0")

    variant("compiled", default=False, description="chorus::compiled, against which programs compile faster")
    variant("zlib", default=False, description="Compressed files")
    variant("openssl", default=False, description="TLS, checksums of files")
    variant("png", default=False, description="PNG files in ImageFolder")
    variant("jpeg", default=False, description="JPEG files in ImageFolder")
    variant("cuda", default=False, description="GPUs")
    variant("mpi", default=False, description="MPI as an engine of collectives")
    variant("gloo", default=False, description="gloo as an engine of collectives")

    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("eigen@3.4:3", type=("build", "link"))
    depends_on("nlohmann-json@3.10:", type=("build", "link"))
    depends_on("zlib-api", when="+zlib")
    depends_on("openssl", when="+openssl")
    depends_on("libpng", when="+png")
    depends_on("jpeg", when="+jpeg")
    depends_on("cuda@12:", when="+cuda")
    depends_on("mpi", when="+mpi")
    depends_on("gloo", when="+gloo")

    conflicts("%gcc@:11", msg="chorus needs C++20 as g++ 12 has it")
    conflicts("%clang@:13", msg="chorus needs C++20 as clang 14 has it")

    def cmake_args(self):
        fixed = ["BUILD_TESTS", "BUILD_EXAMPLES", "NATIVE"]
        parts = ["zlib", "openssl", "png", "jpeg", "cuda", "mpi", "gloo"]
        return (
            [self.define(f"CHORUS_{name}", False) for name in fixed]
            + [self.define("CHORUS_INSTALL", True), self.define_from_variant("CHORUS_BUILD_COMPILED", "compiled")]
            + [self.define_from_variant(f"CHORUS_WITH_{part.upper()}", part) for part in parts]
        )
