package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// attackDisk has the server refuse to write, and its disks be full.
func attackDisk(ctx context.Context, l *site, c *chapter) error {
	c.say("Two processes repeat the exact accounts while default_transaction_read_only goes on and off. Then the tables are on a small file system, which fills up and is emptied again. Last, the write-ahead log is on that file system, and the server stops each time until there is space.")
	rounds := 6
	if l.quick {
		rounds = 1
	}
	if err := l.readOnly(ctx, c, rounds); err != nil {
		return err
	}
	small, disks, err := l.onSmallDisks(ctx)
	if errors.Is(err, errNoMount) {
		c.notRun("full disks", err.Error())
		return nil
	}
	if err != nil {
		return err
	}
	defer disks.remove()
	err = small.fullTables(ctx, c, disks, rounds)
	if err == nil {
		err = small.fullLog(ctx, c, disks, (rounds+1)/2)
	}
	return errors.Join(err, small.close())
}

// two are the processes that do the work.
var two = []task{
	{Conns: 8, Workers: 8, Patience: 5 * time.Second},
	{Conns: 8, Workers: 8, Patience: 5 * time.Second, Isolation: "repeatable read"},
}

func (l *site) readOnly(ctx context.Context, c *chapter, rounds int) error {
	defer func() { // it is off by now, unless this failed
		_ = l.set(context.WithoutCancel(ctx), "default_transaction_read_only", "off")
	}()
	const refuses = "25006"
	harm := func(ctx context.Context, s *suffering) error {
		return s.rounds(ctx, rounds, func() error {
			if err := l.set(ctx, "default_transaction_read_only", "on"); err != nil {
				return err
			}
			return errors.Join(s.suffers(ctx, refuses), l.set(ctx, "default_transaction_read_only", "off"))
		})
	}
	_, err := l.suffer(ctx, c, attack{tasks: two, harm: harm, must: func(s *suffering) []count {
		return []count{{"told that the server is read-only (25006)", s.coded(refuses)}}
	}})
	return err
}

// set changes a setting of the running server, and returns when it holds.
func (l *site) set(ctx context.Context, name, value string) error {
	if err := l.ask(ctx, fmt.Sprintf("ALTER SYSTEM SET %s = '%s'", name, value)); err != nil {
		return err
	}
	return lab.Within(ctx, 10*time.Second, name+" is "+value, func() bool {
		var reloaded bool
		var now string
		return l.ask(ctx, "SELECT pg_reload_conf(), current_setting('"+name+"')", &reloaded, &now) == nil && now == value
	})
}

// disks are two small file systems.
type disks struct{ dir string }

const diskSize = 48 << 20

func (d disks) tables() string { return filepath.Join(d.dir, "tables") }
func (d disks) log() string    { return filepath.Join(d.dir, "log") }

func newDisks() (d disks, err error) {
	if d.dir, err = os.MkdirTemp("", "ratelimit-disks"); err != nil {
		return d, err
	}
	err = os.Chmod(d.dir, 0o755) // the server is another user
	for _, disk := range []string{d.tables(), d.log()} {
		if err == nil {
			err = os.Mkdir(disk, 0o755)
		}
		if err == nil {
			err = mountSmall(disk, diskSize)
		}
	}
	if err != nil {
		d.remove()
	}
	return d, err
}

// errNoMount is a machine on which no file system can be mounted, which is for root on Linux to do.
var errNoMount = errors.New("no small file system can be mounted")

func mountSmall(dir string, size int) error {
	options := fmt.Sprintf("size=%d,mode=0755", size)
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", options, "tmpfs", dir).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %w: %s", errNoMount, err, out)
	}
	return nil
}

func (d disks) remove() {
	for _, disk := range []string{d.tables(), d.log()} {
		_ = exec.Command("umount", "--lazy", disk).Run() // it may not have come that far
	}
	_ = os.RemoveAll(d.dir)
}

// fill fills a file system up; it returns a function that frees it again.
func fill(disk string) (free func() error, err error) {
	name := filepath.Join(disk, "filler")
	file, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	for chunk := make([]byte, 1<<20); len(chunk) > 0; {
		if _, err := file.Write(chunk); err != nil {
			chunk = chunk[:len(chunk)/2] // down to the last byte
		}
	}
	return func() error { return os.Remove(name) }, nil
}

// onSmallDisks starts a server whose log and whose tables are on small file systems.
func (l *site) onSmallDisks(ctx context.Context) (small *site, d disks, err error) {
	if d, err = newDisks(); err != nil {
		return nil, d, err
	}
	wal, tables := filepath.Join(d.log(), "wal"), filepath.Join(d.tables(), "space")
	if err := errors.Join(os.Mkdir(wal, 0o700), os.Mkdir(tables, 0o700)); err != nil {
		d.remove()
		return nil, d, err
	}
	with := map[string]string{"min_wal_size": "2MB", "max_wal_size": "8MB"}
	for name, value := range settings {
		with[name] = value
	}
	server, err := throwaway.StartWith(ctx, throwaway.Options{Fsync: true, Restart: true, Settings: with, WALDir: wal})
	if err != nil {
		d.remove()
		return nil, d, err
	}
	small = &site{options: l.options, server: server, tablespace: "small"}
	err = exec.Command("chown", "--reference="+wal, tables).Run()
	if err == nil {
		err = small.ask(ctx, "CREATE TABLESPACE small LOCATION '"+tables+"'")
	}
	if err != nil {
		err = errors.Join(err, small.close())
		d.remove()
		return nil, d, err
	}
	return small, d, nil
}

func (l *site) fullTables(ctx context.Context, c *chapter, d disks, rounds int) error {
	const full = "53100"
	harm := func(ctx context.Context, s *suffering) error {
		return s.rounds(ctx, rounds, func() error {
			free, err := fill(d.tables())
			if err != nil {
				return err
			}
			told := s.suffers(ctx, full) // when the pages are full that the tables have already
			return errors.Join(told, free())
		})
	}
	_, err := l.suffer(ctx, c, attack{tasks: two, harm: harm, must: func(s *suffering) []count {
		return []count{{"told that the disk is full (53100)", s.coded(full)}}
	}})
	return err
}

func (l *site) fullLog(ctx context.Context, c *chapter, d disks, rounds int) error {
	fell := 0
	_, err := l.suffer(ctx, c, attack{tasks: two, harm: func(ctx context.Context, s *suffering) error {
		return s.rounds(ctx, rounds, func() error {
			fell++
			return l.crash(ctx, func() (up func() error, err error) {
				free, err := fill(d.log())
				if err != nil {
					return nil, err
				}
				return free, lab.Within(ctx, patient, "the server falls", func() bool {
					return l.ask(ctx, "SELECT pg_switch_wal()") != nil // the rest of the log is used up sooner
				})
			})
		})
	}})
	c.happened(count{"server that fell because the disk of its log was full", fell})
	return err
}
