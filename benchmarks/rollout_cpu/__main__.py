import sys

from benchmarks.rollout_cpu.run import main

sys.exit(main())
