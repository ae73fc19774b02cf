#pragma once
/// Lab 16: what the student's code gets and gives.

#include "../lab.hpp"

namespace rank_dies_lab {

inline constexpr const char* title = "Lab 16: a rank dies";

/// Seconds without a sign after which a rank counts as dead; and until when all ranks have to know.
inline constexpr double silence = 1, deadline = 2;

enum class Heard {
  number,  ///< a number has come
  closed,  ///< the link is closed, and all numbers have come: the other's process has ended. It died, or it gave up
  nothing  ///< nothing until then
};

/// A rank in a ring all-reduce of one number, as its program sees it, in virtual seconds. Numbers are sent elsewhere.
/// All ranks of the machine share a board. A rank that computes writes nothing on it, for up to 0.9 s.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual double now() = 0;
  /// Waits for the next number from rank `from`, until the time `until` at most.
  virtual Heard receive(int from, double until, double& number) = 0;
  /// Writes on the board that this rank is alive at now(), and that it waits for rank `whom`; -1: for none.
  virtual void sign(int whom) = 0;
  /// A rank's last sign: when it wrote it, and for whom it waited.
  struct Sign {
    double at;
    int waits_for;
  };
  virtual Sign last_sign(int rank) = 0;
  /// The rank that the board names as dead; -1: none.
  virtual int named() = 0;
  /// Writes `rank` on the board as dead if it names none yet. Returns the rank that the board names.
  virtual int name(int rank) = 0;
};

/// A rank's training by the library: a model with dropout, samples in a drawn order, momentum, DDP. A launcher starts
/// the job again after a death: `train` is called anew, in new processes.
class Training {
 public:
  static constexpr int steps = 40, steps_of_epoch = 12;
  virtual ~Training() = default;
  virtual bool has_checkpoint() = 0;
  /// Reads parameters and momentum from the checkpoint. Returns after how many steps it was written.
  virtual int load() = 0;
  /// Writes a checkpoint after so many steps.
  virtual void save(int after_steps) = 0;
  /// Draws the order of an epoch's samples, by the epoch's number. The next step has batch `batch` of it.
  virtual void begin_epoch(int epoch, int batch) = 0;
  /// Dropout draws by the number of the forward pass. The next step has that number; in a new process, 0.
  virtual void next_pass(int number) = 0;
  /// Trains with the next batch. If another rank dies, it throws, which ends this process; don't catch it.
  virtual void step() = 0;
};

struct Code {
  /// Receives the next number from rank `from`, and returns -1; or returns the dead rank. Then this rank gives up.
  int (*hear)(Rank& me, int from, double& number);
  /// Makes Training::steps steps, with a checkpoint after every 10, from the newest checkpoint if there is one.
  void (*train)(Training& run);
};

void check(lab::Lab& lab, const Code& code);

}  // namespace rank_dies_lab
