"""The command line: one module a verb, listed in :data:`lightning_oom.cli.main.COMMANDS`."""
