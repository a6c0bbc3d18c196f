# Made by `python -m tools.spec.settings > tools/spec/settings.mk`; a test compares.
## Variables: what is trained [every training target]
##   ITERS            iterations (100; 25 for a tiny model) [not soak]
##   MICRO_BATCH      samples in a rank's forward pass [every training target but compare-pipelines, dryrun plan]
##   GLOBAL_BATCH     samples in an iteration [every training target but compare-pipelines, plan advise dryrun]
##   SEED             seed of weights, dropout and sample order (1234) [also verify-matrix verify-fuzz verify-bf16 verify-hf]
##   DROPOUT          attention and hidden dropout
##   OPTIMIZER        adamw, muon or megatron-muon, which is Megatron's rule under BACKEND=native too
##   DATA             data set, such as owt-ds/mine_text_document [also verify-hf]
##   EXTRA            further Megatron flags, "--lr 1e-4" [also verify-hf]
##   DTYPE            fp32 or bf16 (fp32) [verify-*-*]
##   REFERENCE        strategy to compare with (baseline, on one rank), native: plain PyTorch, or hf: transformers [verify-*-*]
##   RESUMED          1 compares a resumed run with the undisturbed one; a strategy: the one that saved [verify-*-*]
##   VERIFY           1 finds the first wrong tensor of a strategy whose losses differ [parity]
##   EXTRA_B          flags of the layout alone, not of its reference [verify-*-* verify-hf]
##   MEGATRON_LM_B    the checkout of the layout alone, not of its reference [verify-*-*]
##   PLANT            Python files, with commas, that each rank runs before it trains [also verify-hf]
##   SHARED_START     start from the shared weights (1 on CPU ranks)
##   BACKEND          megatron, native (PyTorch), deepspeed, or transformers for an imported model [not demo parity reproduce compare-* verify-*-*]
##   FUSED            kernels without Transformer Engine: norm,adamw,…
##   MEGATRON_LM      a Megatron-LM checkout, not the wheel [also verify-matrix verify-fuzz verify-bf16 verify-hf bench-preprocess list test-slow]
##   UNTRIED          1 trains with a Megatron version that was not tried [also verify-matrix verify-fuzz verify-bf16 verify-hf]
## Variables: the parity matrix [verify-matrix verify-fuzz verify-bf16]
##   FEATURES         families, features, levels of the matrix (all) [verify-matrix verify-fuzz]
##   LAYOUTS          layouts of the matrix (all)
##   PAGE             folder of the matrix's pages (beside its cells)
##   MINUTES          minutes after which no cell is begun [verify-matrix verify-fuzz]
## Variables: where and how it is trained [every training target]
##   DRY_RUN          1 prints the command and trains nothing [also verify-matrix verify-fuzz prepare-ds* image]
##   RUNS             folder of run folders (runs) [also verify-matrix verify-fuzz verify-bf16 verify-hf status report explain calibrate]
##   RUN              run folders to explain (all) [explain]
##   RUNTIME          docker or host, on GPUs [also prepare-ds*]
##   IMAGE            one of docker/versions.env [also prepare-ds* image]
##   HOST_NETWORK     1 gives containers this host's network
##   SHARE_GPU        1 puts all ranks on one GPU
##   NET              shaped link between CPU ranks, 1gbps; needs root
##   REPEATS          repetitions of the run; the report pools them [not soak]
##   WANDB            1 logs to Weights & Biases
##   WANDB_PROJECT WANDB_ENTITY  the names in W&B
##   WANDB_MODE       online, offline or disabled
##   LEDGER           0 switches the ledgers off
##   CALIBRATE        1 measures this machine before planning [train-auto-*]
##   HANG_TIMEOUT     seconds without a log line before the run is ended (900)
## Variables: checkpoints [train-* trace-* resume sweep soak loss-curve bench-gpu bench-ledger bench-auto]
##   SAVE_EVERY       iterations between checkpoints
##   KEEP             checkpoints to keep (2)
##   ASYNC_SAVE       1 saves in the background, on GPUs
##   RUN_FOLDER       an existing folder for this run [train-*]
##   RUN              the run folder to resume or stop [resume stop]
##   STRATEGY         resume in another layout [resume]
##   STRATEGY         what to train for HOURS= [soak]
##   HOURS            hours of a soak, 0.33 or 24 [soak]
## Variables: several machines without Slurm [train-* resume]
##   NNODES           number of machines
##   NODE_RANK        0 to NNODES-1, another on each machine
##   MASTER_ADDR      address of the machine with NODE_RANK=0
##   MASTER_PORT      port on that machine (29500)
##   RENDEZVOUS       torchrun's: static or c10d
## Variables: Slurm [train-* sweep doctor]
##   LAUNCHER         slurm submits a job instead of training here
##   NODES            machines [also plan advise]
##   SLURM_PARTITION SLURM_ACCOUNT SLURM_QOS SLURM_TIME  as in sbatch
##   SLURM_LINES      further sbatch options, "--exclusive"
##   SLURM_IMAGE      container image, for Pyxis
##   SLURM_SITE       file of shell lines for every job (site.slurm)
## Variables: several runs [sweep]
##   MODELS           every combination is trained, DEVICES="1cpu 2cpu" [also bench-auto]
##   STRATEGIES BACKENDS  every combination is trained, DEVICES="1cpu 2cpu"
##   DEVICES          every combination is trained, DEVICES="1cpu 2cpu" [also bench-auto]
##   DEVICES          2gpu or 2cpu (all of this machine) [calibrate]
##   ONLY             these settings alone [bench-gpu]
##   BUDGET           seconds for all settings (510) [bench-gpu]
##   TARGET           the training target to use [loss-curve bench-ledger]
## Variables: planning [plan]
##   MODEL            a model of make list, or an .args file or config.json (not compare-*) [also advise dryrun compare-* verify-*-* soak train-* trace-* resume]
##   GPUS             number of devices [also advise import-recipe]
##   GPU              h200, a100-80g, … (h200) [also advise compare-zero]
##   GPUS_PER_NODE    devices per NVLink domain (8, of GB200 72) [also advise]
##   INTRA            link inside a machine [also advise]
##   INTER            link between machines [also advise]
##   OVERSUBSCRIPTION  ports' rate over uplinks' between machines (1) [also advise]
##   IMBALANCE        tokens of the busiest rank of experts, for the mean (1) [also advise]
##   SEQ              sequence length [also advise dryrun]
##   DTYPE            fp16, bf16 or fp32 [also advise dryrun compare-zero]
##   TOKENS           tokens to train on
##   CALIBRATION      file of measured constants [also advise]
##   VERIFY           dry-run this many of the best
##   ALPA             1 also solves Alpa's dynamic program
## Variables: dry run and schedules [dryrun]
##   DP               data-parallel replicas
##   TP               TP degree
##   PP               pipeline stages [also schedules]
##   CP               CP degree
##   EP               EP degree, inside DP and CP
##   VPP              virtual stages per rank [also schedules]
##   SP               1 adds sequence parallelism
##   ZERO1            1 shards optimizer states
##   RECOMPUTE        none, selective, full, "full block 2" or modules, "layernorm mlp" [also plan]
##   RANKS            first,middle,last or numbers
##   MICROBATCHES     microbatches in an iteration [schedules]
##   SVG              write a picture to this file [plan schedules]
##   JSON             1 prints JSON [also plan advise schedules validate audit compare-zero]
##   LAYOUT           times this layout alone, tp8pp16dp8-zero1 [plan]
##   WHAT_IF          another beside LAYOUT=, "GPU=b200 MICRO_BATCH=2" [plan]
##   EXTRA            Megatron flags of the planned model and layout [plan advise]
##   TABLE            a CSV or Markdown table of figures [audit]
##   LEAVE_OUT        the source that constants are fitted without (each reading's own) [validate]
##   READINGS         your own readings (all but validate: readings/mine.csv) [validate plan advise report]
## Variables: weights from and to Hugging Face [import-hf]
##   HF               a folder with config.json and safetensors, or its name on the hub [also verify-hf]
##   STRATEGIES       layouts to compare with transformers (seven) [verify-hf]
##   NAME             name of the model (HF's)
##   RUN              a run folder, or hub/NAME [export-hf]
##   TO               the folder to write [export-hf]
## Variables: recipes of Megatron-Bridge [export-recipe]
##   RUN              a run folder, or a target that need not have run
##   TO               bridge, or nemo for nemo-run's entry too
##   FILE             recipe.py, recipe.py:function or Bridge's YAML [import-recipe]
##   NAME             name of the model (the file's) [import-recipe]
## Variables: reports [report]
##   LOGS             Megatron logs, wherever they were made
##   NAME             name of the report or sweep [also sweep]
##   BASELINE         an earlier report to compare with
##   DEVICE           GPU that the logs were made on, such as h100
##   STRICT           1 exits with an error on a finding
## Variables: data [prepare-ds]
##   NAME             name of the data set
##   INPUT            text files: JSONL, also .gz or .zst; parquet
##   TOKENIZER        gpt2, or a folder with tokenizer.json
##   HF_ENDPOINT      mirror of the Hugging Face hub [prepare-ds-openwebtext-10k doctor]
##   MEGATRON_URL     mirror of Megatron-LM's repository [image]
