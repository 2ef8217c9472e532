package catalog

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// editor edits the catalog in a transaction.
type editor interface {
	// as names the author of the later changes in this transaction, for the history.
	as(ctx context.Context, who string) error

	// lock waits until no other edit is under way. No other begins until unlock, or the end of the
	// transaction.
	lock(ctx context.Context) (unlock func(), err error)
	rowsOf(ctx context.Context, names []string, key string) (*reading, error)
	publish(ctx context.Context, p *published) error
	set(ctx context.Context, e *Entry) error
	unset(ctx context.Context, at place) error
	forget(ctx context.Context, name string) (int64, error)
}

type tableEditor struct {
	*table
	tx pgx.Tx
}

func (t tableEditor) as(ctx context.Context, who string) error {
	_, err := t.tx.Exec(ctx, "SELECT set_config('ratelimit.who', $1::text, true)", who)
	return fault("say who makes a change", err)
}

func (t tableEditor) lock(ctx context.Context) (func(), error) {
	return func() {}, t.table.lock(ctx, t.tx)
}

func (t tableEditor) rowsOf(ctx context.Context, names []string, key string) (*reading, error) {
	return t.table.rowsOf(ctx, t.tx, names, key)
}

func (t tableEditor) publish(ctx context.Context, p *published) error {
	return t.table.publish(ctx, t.tx, p)
}

func (t tableEditor) set(ctx context.Context, e *Entry) error { return t.table.set(ctx, t.tx, e) }

func (t tableEditor) unset(ctx context.Context, at place) error {
	return t.table.unset(ctx, t.tx, at.name, at.key)
}

func (t tableEditor) forget(ctx context.Context, name string) (int64, error) {
	return t.table.forget(ctx, t.tx, name)
}

type memoryEditor struct {
	*memory
	who string
}

func (m *memoryEditor) as(_ context.Context, who string) error {
	m.who = who
	return nil
}

func (m *memoryEditor) lock(context.Context) (func(), error) {
	m.editing.Lock()
	return m.editing.Unlock, nil
}

func (m *memoryEditor) rowsOf(_ context.Context, names []string, key string) (*reading, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.memory.rowsOf(names, key), nil
}

func (m *memoryEditor) publish(_ context.Context, p *published) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.publish(p, m.who)
	return nil
}

func (m *memoryEditor) set(_ context.Context, e *Entry) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.set(*e, m.who)
	return nil
}

func (m *memoryEditor) unset(_ context.Context, at place) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.unset(at, m.who)
	return nil
}

func (m *memoryEditor) forget(_ context.Context, name string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.memory.forget(name, m.who), nil
}
