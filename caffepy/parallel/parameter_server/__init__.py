"""A parameter server: workers that need not keep step, and machines that come, go and die.

A worker trains on its own for some iterations, then pushes the change of its parameters to the
servers, which average, and pulls the newest values. How far workers may drift apart is the slack,
see `messages.Rule`. Start reading with `client`, what a worker does, and `server`, what it meets;
`range_state` has the arithmetic, `coordinator` who takes part.
"""
