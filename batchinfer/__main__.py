"""`python -m batchinfer`."""

from batchinfer.cli import main

if __name__ == "__main__":
    main()
