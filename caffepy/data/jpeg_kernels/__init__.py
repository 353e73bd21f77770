"""JPEG files decoded by kernels: several images in one call without Python's lock, straight to the
planes of a batch, and resized there if need be.

Pixels are those of libjpeg-turbo, by which OpenCV decodes, to the last bit: its slow integer IDCT,
its "fancy" upsampling of colours, its conversion from YCbCr. Files that are damaged, progressive,
or unusual in another way are left to OpenCV.

    file -> headers.parse: size, sampling, tables, where the codes begin
         -> scan.scan: codes -> coefficients of 16 blocks -> idct.transform -> planes of samples
         -> color.fill_row: a row's colours to the image's width, then B, G and R
         -> resize.fill_image: rows to their places, or what is read of them
         -> windows.decode_windows: windows of images, to a batch of floats

What a thread needs for that lies in a `room.Room` of its own. Begin to read with `decode`.
"""

from caffepy.data.jpeg_kernels.decode import PIECE, decode_files, decode_named, load
from caffepy.data.jpeg_kernels.windows import decode_windows

__all__ = ["PIECE", "decode_files", "decode_named", "decode_windows", "load"]
