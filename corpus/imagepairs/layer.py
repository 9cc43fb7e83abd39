"""A layer: the difference between two states of a directory tree, as a reproducible gzipped tar.

Entries are sorted, times are clamped, owners are numbers, and what differs from one installation
of the same packages to the next is removed (`tidy`). Removed files become `.wh.` entries as the
OCI image specification has them (layer.md, "Whiteouts").
"""

import hashlib
import os
import stat
import struct
import tarfile
import zlib
from dataclasses import dataclass

from . import host

# What an installation leaves that is not part of it: lists and caches (as the official images
# remove them), and what is different each time. Directories are emptied, not removed.
VOLATILE_DIRECTORIES = (
    "tmp",
    "var/tmp",
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/man",
    "var/cache/fontconfig",
    "run/lock",
    "var/log",
)
VOLATILE_FILES = (
    "etc/.pwd.lock",
    "etc/apt/sources.list",  # the mirror is the builder's affair, and its address may hold a password
    "etc/group-",
    "etc/gshadow-",
    "etc/hostname",
    "etc/machine-id",
    "etc/passwd-",
    "etc/resolv.conf",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "usr/sbin/policy-rc.d",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/passwords.dat",
    "var/cache/debconf/templates.dat-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/available-old",
    "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/statoverride-old",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/triggers/Lock",
    "var/lib/apt/daily_lock",
    # A key that every image of this build would share is worse than none.
    "etc/ssl/certs/ssl-cert-snakeoil.pem",
    "etc/ssl/private/ssl-cert-snakeoil.key",
)

# The trailer of a Java keystore is a SHA-1 over the password, this, and the content.
_JKS_MAGIC = 0xFEEDFEED
_JKS_SALT = b"Mighty Aphrodite"


@dataclass
class Entry:
    """What one path of a tree is; two equal entries need no place in the difference."""

    kind: int  # stat.S_IFMT
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int  # of a regular file, bytes
    digest: str  # SHA-256 of a regular file's content
    target: str  # of a symlink
    device: int
    xattrs: tuple  # of (name, bytes), sorted
    links: tuple  # all paths of a hardlinked file, sorted; () for a file with one path


def tidy(root, epoch):
    """Removes or rewrites in `root` what would differ between two installations of one content.

    `epoch` (seconds) replaces the time of the build where a file holds it.
    """
    for directory in VOLATILE_DIRECTORIES:
        path = os.path.join(root, directory)
        if os.path.isdir(path) and not os.path.islink(path):
            for place, _, files in os.walk(path):
                # Directories stay: packages own some (var/log/redis), with an owner that matters.
                # Links stay as well: nginx's logs go to /dev/stdout by one.
                for name in files:
                    if not os.path.islink(os.path.join(place, name)):
                        os.unlink(os.path.join(place, name))
    for name in VOLATILE_FILES:
        path = os.path.join(root, name)
        if os.path.lexists(path):
            os.unlink(path)
    # Links that update-ca-certificates and c_rehash made to a removed certificate.
    certificates = os.path.join(root, "etc/ssl/certs")
    if os.path.isdir(certificates):
        for name in os.listdir(certificates):
            path = os.path.join(certificates, name)
            if os.path.islink(path) and "snakeoil" in os.readlink(path):
                os.unlink(path)
    _fix_shadow(os.path.join(root, "etc/shadow"), epoch // 86400)
    _fix_keystore(os.path.join(root, "etc/ssl/certs/java/cacerts"), epoch * 1000)


def _fix_shadow(path, day):
    """Sets the day of the last password change, which useradd takes from the clock, to `day`."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        lines = [line.split(":") for line in file.read().splitlines()]
    for fields in lines:
        if len(fields) > 2 and fields[2].isdigit():
            fields[2] = str(min(int(fields[2]), day))
    _rewrite(path, "".join(":".join(fields) + "\n" for fields in lines).encode())


def _fix_keystore(path, time_ms):
    """Sets the creation time of every certificate in a Java keystore (JKS, version 2) and sorts them."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count = struct.unpack_from(">IIi", data)
    if magic != _JKS_MAGIC or version != 2:
        raise host.Problem(host.FAILED, f"{path}: not a Java keystore of version 2")
    position, entries = 12, []
    for _ in range(count):
        (tag, length) = struct.unpack_from(">IH", data, position)
        if tag != 2:
            raise host.Problem(host.FAILED, f"{path}: holds a private key")
        alias = data[position : position + 6 + length]
        position += 6 + length + 8  # the eight bytes are the creation time
        start = position
        (length,) = struct.unpack_from(">H", data, position)  # certificate type
        position += 2 + length
        (length,) = struct.unpack_from(">I", data, position)
        position += 4 + length
        entries.append(alias + struct.pack(">q", time_ms) + data[start:position])
    body = data[:12] + b"".join(sorted(entries))
    password = "changeit".encode("utf-16-be")  # Debian's, and Java's own default
    if hashlib.sha1(password + _JKS_SALT + data[:position]).digest() != data[position:]:
        raise host.Problem(host.FAILED, f"{path}: checksum does not match")
    _rewrite(path, body + hashlib.sha1(password + _JKS_SALT + body).digest())


def _rewrite(path, data):
    """Replaces a file's content where it differs; owner, mode and links stay."""
    with open(path, "r+b") as file:
        if file.read() != data:
            file.seek(0)
            file.truncate()
            file.write(data)


def newest(root, before):
    """The newest modification time in `root` that is older than `before`, in whole seconds.

    Packages carry times of their own, so this is a date of the content and not of the build: two
    builds of the same packages find the same.
    """
    latest = 0
    for path, _ in _walk(root):
        time = int(os.lstat(os.path.join(root, path)).st_mtime)
        if latest < time < before:
            latest = time
    return latest


def clamp(root, epoch):
    """Sets all times in `root` that are later than `epoch` to it."""
    for path, _ in list(_walk(root)):
        full = os.path.join(root, path)
        info = os.lstat(full)
        if info.st_mtime_ns > epoch * 10**9:
            os.utime(full, (epoch, epoch), follow_symlinks=False)


def _walk(root):
    """All paths below `root`, relative, with their scandir entry; not across filesystems."""
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(os.path.join(root, directory)) as entries:
            for entry in entries:
                path = os.path.join(directory, entry.name)
                yield path, entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)


def scan(root, known=None):
    """What `root` holds: {path: Entry}, and {path: identity} to hand to the next scan as `known`.

    A file whose identity is `known` is not read again.
    """
    found, identities, groups = {}, {}, {}
    for path, _ in _walk(root):
        full = os.path.join(root, path)
        info = os.lstat(full)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFSOCK:
            continue  # tar has no sockets, and nobody listens on it any more
        digest, size, links = "", 0, ()
        if kind == stat.S_IFREG:
            size = info.st_size
            identity = (info.st_ino, size, info.st_mtime_ns, info.st_ctime_ns)
            if known and path in known and known[path][0] == identity:
                digest = known[path][1]
            else:
                digest = _hash_file(full)
            identities[path] = (identity, digest)
            if info.st_nlink > 1:
                links = groups.setdefault(info.st_ino, [])
                links.append(path)
        xattrs = []
        if kind != stat.S_IFLNK:
            for name in sorted(os.listxattr(full, follow_symlinks=False)):
                # security.selinux is the host's label, trusted.* is overlayfs's business.
                if name == "security.capability" or name.startswith(("user.", "system.posix_acl_")):
                    xattrs.append((name, os.getxattr(full, name, follow_symlinks=False)))
        found[path] = Entry(
            kind=kind,
            mode=stat.S_IMODE(info.st_mode),
            uid=info.st_uid,
            gid=info.st_gid,
            mtime=int(info.st_mtime),
            size=size,
            digest=digest,
            target=os.readlink(full) if kind == stat.S_IFLNK else "",
            device=info.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            xattrs=tuple(xattrs),
            links=links,
        )
    for paths in groups.values():
        group = tuple(sorted(paths))
        for path in group:
            found[path].links = group if len(group) > 1 else ()
    return found, identities


def _hash_file(path):
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def difference(before, after):
    """The paths of `after` that differ from `before`, and those removed, both sorted.

    Directories above a change are included, as container engines do, so that a layer alone tells
    their owner and mode. Of a hardlinked file either all paths are included or none. Below a
    removed directory nothing is listed: its own whiteout says it all.
    """
    changed = {path for path, entry in after.items() if before.get(path) != entry}
    removed = set()
    for path in before:
        parent = os.path.dirname(path)
        # Gone; and what was above it still is a directory, otherwise that path's change covers it.
        if path not in after and (not parent or parent in after and after[parent].kind == stat.S_IFDIR):
            removed.add(path)
    for path in list(changed) + list(removed):
        while path := os.path.dirname(path):
            changed.add(path)
    return sorted(changed), sorted(removed)


def _sort_key(path):
    """Orders a directory directly before what is in it."""
    return path.split("/")


class _Sink:
    """Where tarfile writes to: hashes the tar, compresses it, hashes and writes the result."""

    def __init__(self, file):
        self.file = file
        self.plain, self.packed = hashlib.sha256(), hashlib.sha256()
        self.plain_size = self.packed_size = 0
        # 16 + 15: a gzip header without name and time. Level 6, as container engines use.
        self.compressor = zlib.compressobj(6, zlib.DEFLATED, 31)

    def write(self, data):
        self.plain.update(data)
        self.plain_size += len(data)
        self._put(self.compressor.compress(data))

    def finish(self):
        self._put(self.compressor.flush())

    def _put(self, data):
        self.packed.update(data)
        self.packed_size += len(data)
        self.file.write(data)


def write(root, entries, changed, removed, epoch, blob_path):
    """Writes the layer that turns `before` into `after` (see `difference`) to `blob_path`.

    Returns {digest, size, diff_id, unpacked, entries}: the digests with `sha256:`, sizes in bytes.
    """
    with open(blob_path, "wb") as file:
        sink = _Sink(file)
        archive = tarfile.open(fileobj=sink, mode="w|", bufsize=1 << 20, format=tarfile.PAX_FORMAT)
        whiteouts = [os.path.join(os.path.dirname(path), ".wh." + os.path.basename(path)) for path in removed]
        written = {}
        for path in sorted(list(changed) + whiteouts, key=_sort_key):
            if path not in entries:
                archive.addfile(_member(path, 0, 0, 0, epoch))
                continue
            entry = entries[path]
            member = _member(path, entry.mode, entry.uid, entry.gid, entry.mtime)
            for name, value in entry.xattrs:
                member.pax_headers["SCHILY.xattr." + name] = value.decode("utf-8", "surrogateescape")
            if entry.kind == stat.S_IFREG:
                if entry.links and entry.links in written:
                    member.type, member.linkname = tarfile.LNKTYPE, written[entry.links]
                    archive.addfile(member)
                    continue
                if entry.links:
                    written[entry.links] = path
                member.size = entry.size
                with open(os.path.join(root, path), "rb") as content:
                    archive.addfile(member, content)
                continue
            if entry.kind == stat.S_IFDIR:
                member.type, member.name = tarfile.DIRTYPE, path + "/"
            elif entry.kind == stat.S_IFLNK:
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
            elif entry.kind == stat.S_IFIFO:
                member.type = tarfile.FIFOTYPE
            else:
                member.type = tarfile.CHRTYPE if entry.kind == stat.S_IFCHR else tarfile.BLKTYPE
                member.devmajor, member.devminor = os.major(entry.device), os.minor(entry.device)
            archive.addfile(member)
        archive.close()
        sink.finish()
    return {
        "digest": "sha256:" + sink.packed.hexdigest(),
        "size": sink.packed_size,
        "diff_id": "sha256:" + sink.plain.hexdigest(),
        "unpacked": sink.plain_size,
        "entries": len(changed) + len(whiteouts),
    }


def _member(path, mode, uid, gid, mtime):
    member = tarfile.TarInfo(path)
    member.mode, member.uid, member.gid, member.mtime = mode, uid, gid, mtime
    return member


def unpack(blob_path, root):
    """Applies a layer that `write` made to `root`."""
    with tarfile.open(blob_path, "r:gz") as archive:
        for member in archive:
            directory, name = os.path.split(member.name)
            whiteout = name.startswith(".wh.")
            path = os.path.join(root, directory, name[4:] if whiteout else name)
            is_directory = os.path.isdir(path) and not os.path.islink(path)
            # What is in the place of an entry of another kind goes with all that is in it.
            if is_directory and not member.isdir():
                host.remove_tree(path)
            elif os.path.lexists(path) and not is_directory and (whiteout or member.isdir()):
                os.unlink(path)
    # GNU tar, since Python's does not restore extended attributes.
    host.run(
        ["tar", "--extract", "--gzip", "--file", blob_path, "--directory", root, "--exclude", ".wh.*"]
        + ["--numeric-owner", "--same-owner", "--preserve-permissions", "--xattrs", "--xattrs-include=*"]
    )
