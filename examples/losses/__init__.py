"""Loss functions of fine-tuning on fixed rollouts, as files for `PATCH_FILE=`."""
