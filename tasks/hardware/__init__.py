"""What only hardware can show: the tasks `gpu` and `validate`.

`plan` says what runs, `running` runs it, `report` writes what was found, `command` is the whole of
it. All import the standard library alone, because a machine may have a torch and nothing else.
"""
