// Package known remembers limits for a process: the definitions that it has met, and the states of
// shards as read last, which guide what is tried first. It also reports rows that have changed. It
// grants nothing, and knows no statement.
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

// OnChange sets the function that is called for each key whose rows this process has changed. It must
// be called before the Known is in use.
func (k *Known) OnChange(changed func(decide.Key)) { k.changed = changed }

// Changed reports that the rows of a key have changed.
func (k *Known) Changed(key decide.Key) {
	if k.changed != nil {
		k.changed(key)
	}
}

// Forget forgets the states of a key's rows after a change that is not a take.
func (k *Known) Forget(key decide.Key) {
	k.Shards.Forget(key)
	k.Changed(key)
}

// Question returns the call for 0 tokens of an edit of the limits and keys of requests.
func (k *Known) Question(requests ...ratelimit.Request) (decide.Call, error) {
	questions := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		questions[i] = r
		questions[i].Count = 0
	}
	call, err := decide.All.Call(&k.Definitions, nil, false, questions)
	if err != nil {
		return decide.Call{}, err
	}
	return call, k.Definitions.NoteEdit(&call)
}

// Granted returns the result of a call that changes at an instant have granted. xid is the transaction
// or savepoint of the changes, and session identifies its connection. session is nil for committed
// changes.
func (k *Known) Granted(call *decide.Call, changes []decide.Change, at time.Time, xid string, session any) ratelimit.Result {
	if k.changed != nil {
		for i := range changes {
			k.changed(changes[i].Key)
		}
	}
	view := decide.View{At: at.UTC()}
	if !call.Plain && call.Sharded() {
		view.States = k.Shards.Taken(call, changes, view.At)
	}
	return call.Receipted(changes, view, xid, session)
}

// Observe remembers the states of a call's shards, as read.
func (k *Known) Observe(call *decide.Call, view decide.View) {
	for i := range call.Demands {
		k.Shards.Observe(&call.Demands[i], view.States[i])
	}
}

// Choose returns the shard to try first.
func (k *Known) Choose(a *decide.Demand) int {
	return k.Shards.Choose(a, decide.UpTo(a.Definition.Shards))
}

// Guess returns a change for each limit of a call, of one row: choose returns its shard. It returns
// false if a count fits no single shard.
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
