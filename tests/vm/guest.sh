# What scenarios share; bash, sourced in the guest with -euo pipefail.

fail() { echo "FAILED: $*"; exit 1; }
trap 'echo "FAILED: $BASH_SOURCE line $LINENO: $BASH_COMMAND"' ERR
set -E

# same WHAT FOUND EXPECTED
same() { [ "$2" = "$3" ] || fail "$1: found \"$2\", expected \"$3\""; }

# has WHAT TEXT PART: the text has this part.
has() { case $2 in *"$3"*) ;; *) fail "$1: no \"$3\" in: $2" ;; esac; }

# filesystem KIND DIR: an empty one on the guest's disk, with fs-verity where it has to be asked for.
filesystem() {
    local options=-f
    [ "$1" != ext4 ] || options="-F -b 4096 -O verity"
    mkdir -p "$2"
    # shellcheck disable=SC2086 # words
    "mkfs.$1" -q $options /dev/vda >/tmp/mkfs 2>&1 || fail "mkfs.$1: $(cat /tmp/mkfs)"
    mount -t "$1" /dev/vda "$2"
}

# rust TEST [ARGUMENT…]: a test binary, with its files on the filesystem at /v if there is one; runs its tests one after the
# other, or as many at a time as $threads says, and says how they ended. All that they need is here, so none may be skipped
# but the one that is for kernels without inode_share.
rust() {
    local test=$1
    shift
    mkdir -p /v
    COFOLIO_PROGRAM=/bin/cofolio TMPDIR=/v RUST_TEST_THREADS=${threads:-1} "$test" --nocapture "$@" </dev/null >/tmp/said 2>&1 ||
        fail "$(tail -n 60 /tmp/said)"
    ! grep SKIP /tmp/said | grep -v "SKIP a_kernel_without_it_says_so" || fail "it was skipped"
    ! grep "ok. 0 passed" /tmp/said || fail "there is no such test"
    grep -E "^test result|^   " /tmp/said
}

# quiet_kernel [PROVOKED]: the kernel has said nothing of EROFS and overlays but what it mounted, that a feature is
# experimental, that a directory of changes is in use (so Cofolio asks: the kernel refuses the second mount), and what
# matches PROVOKED, and has not been in trouble.
quiet_kernel() {
    local said expected="mounted with root inode|EXPERIMENTAL EROFS page cache share support in use"
    expected+="|upperdir is in-use .* to override exclusive upperdir protection${1+|$1}"
    said=$(dmesg | grep -E "erofs|overlay|WARNING|BUG:|Oops|Busy inodes|Call Trace" | grep -vE "$expected" || true)
    same "what the kernel said" "$said" ""
}
