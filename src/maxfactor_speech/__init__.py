"""Training speech recognition: a Whisper on speech synthesised on the spot, or on your own.

Needs `pip install 'maxfactor[speech]'`. Nothing is imported here, so that the parts that need
little (a worker process that only synthesises) start quickly.
"""
