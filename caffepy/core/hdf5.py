"""HDF5 files that others wrote: refuse what would read other files, or fill the memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import h5py

MOST = 1 << 30  # bytes that any file may unpack to
MOST_A_BYTE = 1 << 11  # and for each byte of its own; gzip packs a thousand into one


def check_size(file: "h5py.File", size: int) -> None:
    """ValueError if datasets of `size` bytes in all are more than the file can hold."""
    own = file.id.get_filesize()
    if size > max(MOST, MOST_A_BYTE * own):
        raise ValueError(f"it claims {size} bytes of values in {own} bytes")


def check_contents(file: "h5py.File") -> None:
    """ValueError if a file names others (external links, external storage, virtual datasets), or
    claims more values than it can hold.
    """
    import h5py

    total = 0

    def elsewhere(name: bytes, info: "h5py.h5l.LinkInfo") -> bytes | None:
        return name if info.type == h5py.h5l.TYPE_EXTERNAL else None  # the first one is returned

    def add(name: str, item: "h5py.HLObject") -> None:
        nonlocal total
        if isinstance(item, h5py.Dataset):
            if item.is_virtual or item.external:
                raise ValueError(f'the values of "{name}" lie in other files')
            total += item.nbytes

    if link := file.id.links.visit(elsewhere, info=True):
        raise ValueError(f'"{link.decode(errors="replace")}" is a link to another file')
    file.visititems(add)
    check_size(file, total)
