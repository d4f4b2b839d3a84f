#include "comm/exchange.h"

#include "common/check.h"

namespace bmtrain {

std::string describe(const Exchange& exchange, const std::string& group, int rank, int size) {
  const std::string label = exchange.label.empty() ? "" : " for \"" + exchange.label + "\"";
  return detail::join(exchange.op, " #", exchange.sequence, label, " (", exchange.bytes,
                      " bytes) on group \"", group, "\", rank ", rank, " of ", size);
}

std::string lost_message(const std::string& what, int peer, const std::string& reason) {
  return detail::join(what, ": the connection to rank ", peer,
                      " was lost; that rank ended, died, or failed first (see its output)",
                      reason.empty() ? "" : ": ", reason);
}

std::string late_message(const std::string& what, double seconds, int peer, const char* direction) {
  return detail::join(what, ": timed out after ", seconds, " s waiting for rank ", peer, direction,
                      "; that rank is stalled, gone, or in another operation");
}

}  // namespace bmtrain
