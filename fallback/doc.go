// Package fallback answers at once while the database is silent. A store of package pgstore waits
// for each call until its time-out, and then fails it. [New] puts a [Store] around it, which does so
// for the first calls only:
//
//	store, err := fallback.New(limits, &fallback.Config{Processes: 8})
//	if err != nil {
//		return err
//	}
//	defer store.Close()
//	limit, err := httplimit.New(store, &httplimit.Config{Policies: policies})
//
// # Silence
//
// Signs of silence are calls that end with a time-out, a refused or lost connection, or an error
// of the server's classes 08 (connection), 53 (resources) or 57P (shut down). Refusals, errors of
// values, locked rows and callers that gave up are none. A sign makes the probe ask: a statement of
// its own, on a connection of its own. After three signs in a row, of which the last is the probe's,
// the database is silent. From then on the probe alone asks, once a second. Its first answer ends
// the silence, and the next call is the database's to decide. A *pgstore.Store answers once its pool
// has a connection, since a call would wait for one in vain.
//
// So a pool whose connections are all in use by the application is no silence, since the probe is
// answered. The calls that then wait for a connection in vain end with [ErrBusy].
//
// # Answers meanwhile
//
// Without Config.Processes every verb fails with a [SilentError]. With it, Allow, Take, AllowAtMost,
// AllowFirst and Check are answered from memory, by a bucket for each key with the limit's rate and
// capacity divided by Processes. It begins with what this process last knew of the key. During a
// silence all processes together grant at most Capacity + Rate · elapsed / Period, if there are no
// more of them than Processes; for a fixed window, Capacity + Rate for each edge. The database
// refills its row meanwhile, so afterwards it grants its own on top.
//
// The buckets stay when a silence ends: a database that comes and goes does not fill them. These
// stay closed, with a SilentError:
//
//   - a process that has not reached the database yet, so that a restart fills nothing;
//   - a limit whose share of the capacity is below one token, or below the count of the call;
//   - a key for which Config.Keys leaves no room;
//   - all verbs that promise or change what the database has: Reserve, Wait, CheckReserve, Credit,
//     Pause, Resume, Reset, and Settle and Cancel of what the database granted.
//
// What memory granted is settled and cancelled in memory, by this Store, also after the silence. Its
// receipt cannot be stored as text.
//
// The verbs in a transaction are not here: without the database there is no transaction. Call them
// on the store itself. Those of permits are [Store.Permits].
package fallback
