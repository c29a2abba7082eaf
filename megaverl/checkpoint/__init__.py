"""Checkpoint folders and their manifests: pure file handling, without torch.

A folder is a checkpoint if it has a manifest, which is written last. CRC-32 checksums
are computed while files are written, and again while they are read.

checkpoints/
    step_00000010/          a complete checkpoint: it gets this name only after all of it was on the disk
        manifest.json       step, roles and their grids, versions, every file with its size and checksum
        state.json          the trainer's own state
        rollouts.safetensors    responses that were not trained on yet, if the run stopped in the middle of a step
        random_00000.json   one per rank: its random generators
        __0_0.distcp        one per rank: its tensors; compared with their checksums as they are loaded
        __0_1.distcp        its objects, if it has any
        .metadata, common.pt, metadata.json     the rest of megatron-core's `torch_dist` format
    step_00000020.tmp/      a partial one: ignored, and removed by the next save
    best.json               the name of the best one
"""

from megaverl.checkpoint.checksummed_files import (
    FIX,
    USE_ANOTHER,
    ChecksummedFile,
    crc32_of,
    read_into,
    read_json,
    sync_folder,
    synced_record,
    write_bytes,
    write_json,
    writing,
)
from megaverl.checkpoint.manifest import (
    FORMAT_VERSION,
    INSIDE_SUFFIX,
    MANIFEST_FILE,
    OBJECTS_SUFFIX,
    PARTIAL_SUFFIX,
    PREFIX,
    TENSORS_SUFFIX,
    Manifest,
    checkpoint_folders,
    damaged,
    folder_of,
    newest_first,
    newest_whole,
    partial_name,
    readable,
)

__all__ = [
    "FIX",
    "FORMAT_VERSION",
    "INSIDE_SUFFIX",
    "MANIFEST_FILE",
    "OBJECTS_SUFFIX",
    "PARTIAL_SUFFIX",
    "PREFIX",
    "TENSORS_SUFFIX",
    "USE_ANOTHER",
    "ChecksummedFile",
    "Manifest",
    "checkpoint_folders",
    "crc32_of",
    "damaged",
    "folder_of",
    "newest_first",
    "newest_whole",
    "partial_name",
    "read_into",
    "read_json",
    "readable",
    "sync_folder",
    "synced_record",
    "write_bytes",
    "write_json",
    "writing",
]
