"""`python -m maxfactor_speech`: the command `maxfactor`, also for `torchrun -m`."""

from maxfactor_speech.cli import main

if __name__ == "__main__":
    main()
