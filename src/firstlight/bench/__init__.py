"""Load on any OpenAI endpoint, and what it makes of it: the client behind `firstlight bench`.

`prompts` and `trace` say what is asked, `arrivals` when, `client` asks and notes the time of every chunk, `load` keeps
many requests going, `metrics` and `report` make figures of the notes. docs/bench.md defines each figure.
"""
