# Shared by the scripts of this folder; sourced, not run.

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

top() { cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd; }

# The Debian mirror that this machine's own apt configuration names; empty when there is none.
debian_mirror() {
    command -v apt-get >/dev/null || return 0
    apt-get indextargets --format '$(LABEL) $(REPO_URI)' 2>/dev/null | awk '$1 == "Debian" { print $2; exit }'
}

# install_packages PACKAGE…: installs what is missing of them, with apt, and says so. None of them starts a daemon.
install_packages() (
    missing=()
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    [ "$(id -u)" -eq 0 ] || die "these packages are missing and only root can install them: ${missing[*]}"
    command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get: ${missing[*]}"
    say "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # What invoke-rc.d and deb-systemd-invoke ask before they start anything (Debian policy 9.3.3).
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    fi
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 && return 0
    apt-get update -qq || die "apt-get update failed"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || die "apt-get could not install: ${missing[*]}"
)

# standard_library TARGET: Rust's is installed for this target, perhaps only now; else says why not.
standard_library() {
    [ ! -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ] || return 0
    command -v rustup >/dev/null || { say "Rust's standard library for $1 is not installed, and there is no rustup to fetch it"; return 1; }
    rustup -q target add "$1" >&2 || { say "Rust's standard library for $1 could not be fetched"; return 1; }
}

# Options for cargo, where compiling takes longer than what is then run.
quick=(--locked --config profile.dev.opt-level=0 --config profile.dev.debug=false)
