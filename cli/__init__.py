"""The command line: one file a command, which turns strings into values and calls
`caffepy.commands`.
"""
