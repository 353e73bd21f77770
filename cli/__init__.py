"""The command line: one file a command. Strings become values here; what is done with them is
elsewhere.
"""
