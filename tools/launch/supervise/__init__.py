"""What is noticed while a run trains: a killed launcher, a hang, a full disk; and how it is put down."""
