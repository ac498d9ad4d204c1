# shellcheck shell=bash
# Shared by the scripts here: what the build needs, and how to get it on Debian 12. Sourced, not run.

# Where cargo puts the programs, also when the caller keeps its target directory elsewhere.
# shellcheck disable=SC2034  # for those who source this
release=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Further packages that a script needs: "command:package", or one name where both are the same.
also_needed=()

# Debian packages that the build needs, by the command or file that proves them.
missing_packages() {
    local package
    command -v cc >/dev/null 2>&1 || echo gcc
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    command -v make >/dev/null 2>&1 || echo make
    command -v pkg-config >/dev/null 2>&1 || echo pkg-config
    # glommio's build script calls git, and stops without one, although it then uses the sources it ships.
    command -v git >/dev/null 2>&1 || echo git
    # BoringSSL below the peer plane: its build is CMake's, and its bindings are generated with libclang. g++ compiles it.
    command -v g++ >/dev/null 2>&1 || echo g++
    command -v cmake >/dev/null 2>&1 || echo cmake
    command -v clang >/dev/null 2>&1 || echo clang
    compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null || echo libclang-dev
    # The messages of consensus are compiled from their description.
    command -v protoc >/dev/null 2>&1 || echo protobuf-compiler
    command -v curl >/dev/null 2>&1 || echo curl
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
    for package in "${also_needed[@]}"; do command -v "${package%%:*}" >/dev/null 2>&1 || echo "${package##*:}"; done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null 2>&1; then sudo "$@"
    else die "need root to run: $* (run it yourself, then start this script again)"; fi
}

# Makes cargo callable: an installed one, else rustup's.
find_cargo() {
    command -v cargo >/dev/null 2>&1 && return 0
    for bin in "${CARGO_HOME:-$HOME/.cargo}/bin" /usr/local/cargo/bin; do
        if [ -x "$bin/cargo" ]; then PATH="$bin:$PATH"; export PATH; return 0; fi
    done
    return 1
}

# Installs what is missing, after saying so.
install_prerequisites() {
    local packages
    packages=$(missing_packages | tr '\n' ' ')
    if [ -n "${packages// /}" ]; then
        command -v apt-get >/dev/null 2>&1 || die "missing: $packages- install them with your package manager"
        say "installing Debian packages: $packages"
        as_root apt-get update -q >&2
        # shellcheck disable=SC2086  # a list of words
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $packages >&2
    fi
    if ! find_cargo; then
        say "no Rust toolchain found: installing rustup into ${CARGO_HOME:-$HOME/.cargo} (https://rustup.rs)"
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain none >&2 \
            || die "rustup could not be installed: install a Rust toolchain (see rust-toolchain.toml), then start this script again"
        find_cargo || die "rustup was installed, but there is no cargo in ${CARGO_HOME:-$HOME/.cargo}/bin"
    fi
}
