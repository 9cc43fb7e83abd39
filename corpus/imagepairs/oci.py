"""OCI image layouts: blobs, config, manifest and index (image-layout.md, config.md, manifest.md)."""

import datetime
import hashlib
import json
import os
import shutil

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def timestamp(epoch):
    """Seconds since 1970 as RFC 3339."""
    return datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def tag(version):
    """A version as an image tag: Debian's epoch goes, and so do characters that tags cannot have."""
    version = version.split(":", 1)[-1]
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in version)


def write_layout(path, name, architecture, layers, process, labels):
    """Writes an image layout to the new directory `path`; returns the manifest's digest.

    `layers`, the lowest first, are dicts with blob (a file), digest, size, diff_id, epoch and
    created_by. `process` is the config's `config` object but for its labels; `name` is the
    reference (`redis:7.0.15`). The same arguments give the same bytes.
    """
    blobs = os.path.join(path, "blobs/sha256")
    os.makedirs(blobs)
    for layer in layers:
        target = os.path.join(blobs, layer["digest"].split(":")[1])
        if os.path.exists(target):
            continue
        try:
            os.link(layer["blob"], target)  # images share blobs on the disk too
        except OSError:
            shutil.copyfile(layer["blob"], target)
    created = timestamp(layers[-1]["epoch"])
    history = [{"created": timestamp(layer["epoch"]), "created_by": layer["created_by"]} for layer in layers]
    for key in ("Entrypoint", "Cmd"):
        if key in process:
            line = {"created": created, "created_by": f"{key.upper()} {json.dumps(process[key])}", "empty_layer": True}
            history.append(line)
    platform = {"architecture": architecture[0], "os": "linux"}
    if architecture[1]:
        platform["variant"] = architecture[1]
    config = {
        "created": created,
        **platform,
        "config": {**process, "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]},
        "history": history,
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _put(blobs, _CONFIG, config),
        "layers": [{"mediaType": _LAYER, "digest": layer["digest"], "size": layer["size"]} for layer in layers],
        "annotations": {"org.opencontainers.image.created": created, **labels},
    }
    descriptor = _put(blobs, _MANIFEST, manifest)
    descriptor["platform"] = platform
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
    _write(os.path.join(path, "oci-layout"), {"imageLayoutVersion": "1.0.0"})
    _write(os.path.join(path, "index.json"), {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [descriptor]})
    return descriptor["digest"]


def _put(blobs, media_type, content):
    data = json.dumps(content, indent=1).encode()
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(blobs, digest), "wb") as file:
        file.write(data)
    return {"mediaType": media_type, "digest": "sha256:" + digest, "size": len(data)}


def _write(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
