# What scenarios share; bash, sourced in the guest with -euo pipefail.

fail() { echo "FAILED: $*"; exit 1; }
trap 'echo "FAILED: $BASH_SOURCE line $LINENO: $BASH_COMMAND"' ERR
set -E

# same WHAT FOUND EXPECTED
same() { [ "$2" = "$3" ] || fail "$1: found \"$2\", expected \"$3\""; }

# has WHAT TEXT PART: the text has this part.
has() { case $2 in *"$3"*) ;; *) fail "$1: no \"$3\" in: $2" ;; esac; }

# refused WHAT PART COMMAND…: the command fails, prints nothing but an error, and the error has this part.
refused() {
    local what=$1 part=$2 output error
    shift 2
    if output=$("$@" 2>/tmp/error); then fail "$what: \`$*\` succeeded: ${output:0:200}"; fi
    error=$(cat /tmp/error)
    [ -z "$output" ] || fail "$what: \`$*\` printed: ${output:0:200}"
    has "$what" "$error" "$part"
    echo "   $what: $error"
}

# filesystem KIND DIR: an empty one on the guest's disk, with fs-verity where it has to be asked for.
filesystem() {
    local options=-f
    [ "$1" != ext4 ] || options="-F -b 4096 -O verity"
    mkdir -p "$2"
    # shellcheck disable=SC2086 # words
    "mkfs.$1" -q $options /dev/vda >/tmp/mkfs 2>&1 || fail "mkfs.$1: $(cat /tmp/mkfs)"
    mount -t "$1" /dev/vda "$2"
}

# The kernel forgets what it read: the next read comes from the disk.
forget_caches() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}

# The files behind loop devices.
loop_files() { cat /sys/block/loop*/loop/backing_file 2>/dev/null || true; }

# rust TEST: a test binary of crates/cofolio, with its files in /v; says how it ended. What it needs of the kernel is
# there; other programs need not be.
rust() {
    COFOLIO_PROGRAM=/bin/cofolio TMPDIR=/v "$1" --nocapture --test-threads=1 >/tmp/said 2>&1 ||
        fail "$(tail -n 60 /tmp/said)"
    ! grep "SKIP.*this kernel has no" /tmp/said || fail "it was skipped"
    grep -E "^test result|^   " /tmp/said
}

# The kernel has said nothing of EROFS and overlays but what it mounted and that a feature is experimental, and has not
# been in trouble.
quiet_kernel() {
    local said
    said=$(dmesg | grep -E "erofs|overlay|WARNING|BUG:|Oops" |
        grep -vE "mounted with root inode|EXPERIMENTAL EROFS page cache share support in use" || true)
    same "what the kernel said" "$said" ""
}
