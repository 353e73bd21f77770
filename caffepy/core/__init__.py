"""What the whole package stands on, and what knows nothing of the rest of it.

Anybody may import from here. `errors` has the one family of exceptions with their exit codes,
and is the place to start reading. `registry` maps names to things, `paths` says where a path in
a prototxt leads, `files` writes files that are whole or absent, `cache` keeps small results from
run to run. `events` is the class whose methods a training run calls. `python_modules` finds the
modules of Python layers, `caffe_alias` gives modules further names, such as `caffe`, and
`abandoned` keeps what belongs to devices that will never finish.
"""
