"""The Python face: pycaffe's names over nets and solvers."""
