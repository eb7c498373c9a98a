"""Programs that a user starts: the command line, the server and profiles.

Imports all rooms below; nothing but `gpt2block.__main__` imports it.
"""
