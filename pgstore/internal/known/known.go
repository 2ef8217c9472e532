// Package known has what a process remembers of limits: the definitions that it has met, the states
// of shards as they were read last, which guide what is tried first, and who learns of a row
// that has changed. It grants nothing, and knows no statement.
package known

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Known is what a process remembers of limits. It is safe for concurrent use, but for OnChange.
type Known struct {
	Definitions decide.Definitions
	Shards      Shards

	changed func(decide.Key)
}

// OnChange has a function called for each key whose rows this process has changed. It is called
// before the Known is in use.
func (k *Known) OnChange(changed func(decide.Key)) { k.changed = changed }

// Changed reports that the rows of a key have changed.
func (k *Known) Changed(key decide.Key) {
	if k.changed != nil {
		k.changed(key)
	}
}

// Forget forgets the states of a key's rows, which were changed otherwise than by a take.
func (k *Known) Forget(key decide.Key) {
	k.Shards.Forget(key)
	k.Changed(key)
}

// Call returns the call of a verb, and remembers the definitions of its limits.
func (k *Known) Call(verb decide.Verb, reserve bool, requests []ratelimit.Request) (decide.Call, error) {
	call, err := verb.Call(reserve, requests)
	if err != nil {
		return decide.Call{}, err
	}
	return call, k.Definitions.NoteCall(&call)
}

// Question returns the call that asks nothing of the limits and keys of requests, whose counts do
// not matter.
func (k *Known) Question(requests ...ratelimit.Request) (decide.Call, error) {
	questions := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		questions[i] = r
		questions[i].Count = 0
	}
	return k.Call(decide.All, false, questions)
}

// Granted returns the result of a call with changes made at an instant. xid is the transaction or
// savepoint that made them, on the connection that session identifies; that is nil when they are
// committed.
func (k *Known) Granted(call *decide.Call, changes []decide.Change, at time.Time, xid string, session any) ratelimit.Result {
	for i := range changes {
		k.Changed(changes[i].Key)
	}
	view := decide.View{At: at.UTC()}
	if call.Sharded() {
		view.States = k.Shards.Taken(call, changes, view.At)
	}
	return call.Receipted(changes, view, xid, session)
}

// Observe remembers the states read of a call's limits.
func (k *Known) Observe(call *decide.Call, view decide.View) {
	for i := range call.Demands {
		k.Shards.Observe(&call.Demands[i], view.States[i])
	}
}

// Choose returns the shard to try first.
func (k *Known) Choose(a *decide.Demand) int {
	return k.Shards.Choose(a, decide.UpTo(a.Definition.Shards))
}

// Guess returns a change of one row for each of the call's limits, with the shard that choose
// returns for the limit; false if a count fits no single shard.
func (k *Known) Guess(call *decide.Call, choose func(i int) int) ([]decide.Change, bool) {
	changes := make([]decide.Change, len(call.Demands))
	for i := range call.Demands {
		a := &call.Demands[i]
		if !a.Sharded() {
			changes[i] = a.Change(i, 0, a.Count)
			continue
		}
		changes[i] = a.Change(i, choose(i), a.Count)
		if a.Count > changes[i].Definition.Capacity {
			return nil, false
		}
		changes[i].Floor = 0 // debt only when no shard has enough, which is not known yet
	}
	return changes, true
}
