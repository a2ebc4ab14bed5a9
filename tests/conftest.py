"""What all tests share."""

import signal

# A run of tests that a shell started in the background ignores Ctrl-C, and so would every process that it starts:
# those that are sent one, to see what they do, must not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
