"""`python -m maxfactor`: the command, for where there is no script, as under `torchrun -m`."""

from maxfactor_speech.cli import main

if __name__ == "__main__":
    main()
