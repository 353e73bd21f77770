"""Sources of training data: each gives records, or rows, in a fixed order and around again.

`database` opens LMDB and LevelDB databases by what a path holds; start reading there.
`lmdb_pages` checks the pages of an LMDB before they are followed. `hdf5`, `image_list` and
`windows` read what the layers HDF5Data, ImageData and WindowData name, `lists` the text files
that list it.
"""
